"""The process that speaks with Ray for a server: `python -m weir.workers.ray.driver`. In Ray's words it is a driver.

It is a process of its own because Ray ends the process of a driver that has lost its cluster, blocks its threads meanwhile, and takes its signals. The
server sends it one message to connect, and one for each worker, with the worker's socket (pool.py). From then on each worker has a thread here, which
makes the actor, connects it with the server (connection.py), and ends the actor when the socket is closed. Batches do not come here. When this process
ends, in whatever way, Ray ends its actors.
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import ray

from weir.wire.frames import FrameParser, Start, WorkerEnded, WorkerLeaves, WorkerPlaced, WorkerWaits, encode_control
from weir.workers.process.channel import RECEIVE_BYTES
from weir.workers.process.entry import ignore_terminal_signals, prepare
from weir.workers.ray.actor import RENEWAL, WorkerActor
from weir.workers.ray.connection import TOKEN_BYTES, connect

MESSAGE_BYTES = 128 << 10  # the longest message of the server
PROBE = 3.0  # seconds to find out whether anything listens at an address
END_GRACE = 5.0  # seconds for a detached actor to unload its model
PATIENCE = 2.0  # seconds without a place after which the worker says why it waits
SOON = 0.1  # seconds to the next try to have an actor of a name that has just ended
LOOK_EVERY = 0.5  # seconds between two looks at a worker without a place, and at nodes that are drained
MAX_REASON = 400  # characters
CALLS = 6  # that an actor runs at once: listen, start, stop, and those of servers that want it too

REMEDY = """what it printed is in this log; if its node ran out of memory, ask for more with --resources '{"memory": BYTES}'"""

REACH = "batches go from the server to the actor directly, so the network has to let that through"

Resources = dict[str, float]


class ActorRequest(NamedTuple):
    """Tells Ray what the server wants of one worker. `number` is its own for each actor, `group` is equal for the workers of one model. A `detached` one outlives the server, in the namespace of that name; `version`: see WorkerActor."""

    number: int
    group: str
    label: str
    num_cpus: float
    num_gpus: float
    resources: Resources
    placement: str
    runtime_env: dict[str, Any]
    request_bytes: int
    result_bytes: int
    detached: str = ""
    version: str = ""

    @property
    def needs(self) -> Resources:
        """The resources that Ray must have free on one node."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}


def main(arguments: Sequence[str]) -> int:
    """Serve the server process `arguments[0]` on the inherited socket `arguments[1]`, until it closes the socket; return the exit code."""
    prepare(int(arguments[0]), [])
    server = socket.socket(fileno=int(arguments[1]))
    os.set_inheritable(server.fileno(), False)
    try:
        connected = join(**json.loads(server.recv(MESSAGE_BYTES)))
    except Exception as error:  # whatever Ray raises for an address, a version or a machine that does not suit it
        server.send(json.dumps({"refused": one_line(error)}).encode())
        return 1
    ignore_terminal_signals()  # again: Ray has set handlers of its own
    try:
        server.send(json.dumps(connected).encode())
    except BrokenPipeError:  # the server has not waited so long
        return 1
    cluster = Cluster()
    threading.Thread(target=cluster.watch, name="weir-nodes", daemon=True).start()
    held: dict[int, HeldActor] = {}
    while (received := socket.recv_fds(server, MESSAGE_BYTES, 3))[0]:
        message, descriptors = json.loads(received[0]), received[1]
        if "end" in message:
            held.pop(message["end"]).end()
        elif "sweep" in message:
            threading.Thread(target=end_detached, kwargs=message["sweep"], daemon=True).start()
        else:
            actor = HeldActor(cluster, server, ActorRequest(**message), descriptors)
            held[message["number"]] = actor
            actor.start()
    ray.shutdown()
    return 0


def namespace_of(detached: str) -> str:
    """Return the namespace of Ray in which the actors are that are detached under this name."""
    return f"weir-{detached}"


def end_detached(detached: str, model: str | None = None, first: int = 0) -> list[str]:
    """End the actors that are detached under this name and have no server now: those of `model`, or of all models, with an index from `first` on.
    Return their names."""
    namespace, ended = namespace_of(detached), []
    for each in ray.util.list_named_actors(all_namespaces=True):
        label, _, index = each["name"].rpartition("/")
        if each["namespace"] != namespace or model not in (None, label) or int(index) < first:
            continue
        with contextlib.suppress(ray.exceptions.RayActorError, ValueError):  # it has just ended
            actor = ray.get_actor(each["name"], namespace)
            if not ray.get(actor.is_owned.remote()):
                end_actor(actor)
                ended.append(each["name"])
    return ended


def end_actor(actor: Any) -> None:
    """Have `actor` unload its model, for END_GRACE seconds at most, and end it."""
    ray.wait([actor.stop.remote()], timeout=END_GRACE)
    ray.kill(actor)


def join(address: str, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Connect to the Ray at `address` ("auto": the one of this machine), or start one ("local"), with the runtime environment for all actors: only
    here does Ray take folders of this machine. Return what there is. Raises what Ray raises, and OSError if nothing listens there."""
    if ":" in address:
        _probe(address)
    started = time.monotonic()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here reports nothing
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    context = ray.init(
        address=address, logging_level=logging.WARNING, log_to_driver=True, runtime_env=runtime_env or None, **more
    )
    return {
        "address": context.address_info["gcs_address"],
        "version": ray.__version__,
        "resources": ray.cluster_resources(),
        "nodes": sum(node["Alive"] for node in ray.nodes()),
        "seconds": time.monotonic() - started,
    }


def _probe(address: str) -> None:
    """Raise OSError unless something listens at `address`: Ray itself tries for most of a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE).close()
    except OSError as error:
        raise ConnectionError(
            f"nothing answers there ({error}); give the address that `ray start --head` has printed, with the port of the GCS"
        ) from error


def one_line(error: BaseException) -> str:
    """Return what `error` says in one line, without the parts that name the actor, which the server knows."""
    lines = (str(error) or type(error).__name__).splitlines()
    if any(line.startswith("Traceback") or line.lstrip().startswith('File "') for line in lines):
        lines = [line for line in lines if line.strip()][-1:]  # what was raised
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("\t")]
    joined = " ".join(lines).partition(" Some common causes include")[0]
    for known in ("The actor died unexpectedly before finishing this task.", "The actor died because"):
        joined = joined.removeprefix(known).strip()
    return joined if len(joined) <= MAX_REASON else joined[:MAX_REASON] + " ..."


class Cluster:
    """The nodes, and which of our workers is on which."""

    def __init__(self) -> None:
        self.placing = threading.Lock()  # held while a worker is placed whose place depends on where the others are
        self._lock = threading.Lock()
        self._held: dict[HeldActor, tuple[str, str]] = {}  # group and node

    def placed(self, actor: "HeldActor", group: str, node: str) -> None:
        """Note where `actor` is."""
        with self._lock:
            self._held[actor] = group, node

    def ended(self, actor: "HeldActor") -> None:
        """Forget `actor`."""
        with self._lock:
            self._held.pop(actor, None)

    def nodes_of(self, group: str) -> list[str]:
        """Return the nodes that workers of `group` are on, the node with most of them first."""
        with self._lock:
            return [node for node, _ in Counter(node for of, node in self._held.values() if of == group).most_common()]

    def strategy(self, request: ActorRequest) -> dict[str, Any]:
        """Return the options with which Ray places a worker."""
        from ray.util import scheduling_strategies as strategies

        if request.placement == "spread":
            return {"scheduling_strategy": "SPREAD"}
        others = self.nodes_of(request.group)
        if not others:
            return {}
        if request.placement == "pack":
            affinity = strategies.NodeAffinitySchedulingStrategy(others[0], soft=True, _spill_on_unavailable=True)
            return {"scheduling_strategy": affinity}
        elsewhere = strategies.NodeLabelSchedulingStrategy(hard={"ray.io/node-id": strategies.NotIn(*others)})
        return {"scheduling_strategy": elsewhere}

    def lack(self, request: ActorRequest) -> str:
        """Return why there is no place for a worker now; "" if there is one."""
        needs, nodes = request.needs, [node for node in ray.nodes() if node["Alive"]]
        taken = self.nodes_of(request.group) if request.placement == "strict-spread" else []
        suitable = [node for node in nodes if node["NodeID"] not in taken]
        if any(all(node["Resources"].get(name, 0) >= amount for name, amount in needs.items()) for node in suitable):
            free = ray.available_resources()
            if all(free.get(name, 0) >= amount for name, amount in needs.items()):
                return ""
        else:
            free = ray.available_resources()
        total = ray.cluster_resources()
        has = ", ".join(f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in needs)
        asks = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
        there = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        alone = f", {len(taken)} with a worker already (placement=strict-spread)" if taken else ""
        return f"no room: a worker asks for {asks or 'a node'}; the cluster has {has + ' on ' if has else ''}{there}{alone}"

    def watch(self) -> None:
        """Tell workers when their node is about to leave the cluster, as long as this process runs."""
        informed: set[HeldActor] = set()
        while True:
            time.sleep(LOOK_EVERY)
            draining = _draining()
            with self._lock:
                held = dict(self._held)
            informed &= held.keys()
            for actor, (_, node) in held.items():
                if node in draining and actor not in informed:
                    informed.add(actor)
                    actor.leave(f"its node {node[:8]} is drained")


def _draining() -> Mapping[str, int]:
    """Return the nodes that Ray drains. Ray has no public call for it; with a Ray that has not this one, such a node is noticed when it ends."""
    try:
        nodes: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    except Exception:
        return {}
    return nodes


class _ServerLeft(Exception):
    """The server has closed the worker's socket."""


class HeldActor(threading.Thread):
    """One worker: the socket to the server, and the actor. `descriptors` are the socket, and those of the arenas that there are; the actor's connection goes
    to `server`."""

    def __init__(
        self, cluster: Cluster, server: socket.socket, request: ActorRequest, descriptors: Sequence[int]
    ) -> None:
        super().__init__(name=f"weir-{request.label}", daemon=True)
        self._cluster = cluster
        self._server = server
        self._request = request
        self._socket = socket.socket(fileno=descriptors[0])
        self._sending = threading.Lock()
        self._shared = list(descriptors[1:])  # of the arenas of requests and results
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._node = ""
        self._actor: Any = None
        self._owner = 0  # the number of this server among those that the actor has had
        self._over = False
        self._loading = False
        self._ending = threading.Lock()
        self._finished = False
        self._ends = not request.detached  # whether the actor ends with its socket
        self._is_ours = True  # no other server can have it

    def run(self) -> None:
        """Hold the actor until the server closes the socket, or the actor ends."""
        try:
            self._serve()
        except _ServerLeft:
            pass
        except Exception as error:  # what Ray raises for options that it does not take, too
            self._lost(error)
        finally:
            self._cluster.ended(self)
            self._over = True
            with self._ending:
                self._finished = True
            if self._ends:
                self._end_actor()
            self._socket.close()
            self._close_shared()

    def end(self) -> None:
        """End the actor, although it is detached, once the socket is closed."""
        with self._ending:
            self._ends = True
        if self._finished:
            self._end_actor()

    def _end_actor(self) -> None:
        if self._actor is None:
            return
        with contextlib.suppress(Exception):
            if self._is_ours or not ray.get(self._actor.is_owned.remote(), timeout=2 * RENEWAL):
                ray.kill(self._actor)

    def leave(self, reason: str) -> None:
        """Tell the server that the worker's node will be gone."""
        self._send(encode_control(WorkerLeaves(reason)))

    def _serve(self) -> None:
        start = self._start_frame()
        self._place()
        self._listen()
        arenas = self._connect()
        self._close_shared()
        self._loading = True
        self._call("start", self._owner, start, arenas).add_done_callback(self._loaded)
        while self._socket.recv(RECEIVE_BYTES):
            pass

    def _start_frame(self) -> bytes:
        parser = FrameParser()
        while data := self._socket.recv(RECEIVE_BYTES):
            for frame in parser.feed(data):
                assert isinstance(frame, Start)
                return bytes(encode_control(frame))
        raise _ServerLeft

    def _connect(self) -> tuple[int, int]:
        """Connect the server with the actor; return the lengths of the arenas that they share. Raises ConnectionError."""
        same_node = self._node == ray.get_runtime_context().get_node_id()
        where = f"node {self._node[:8]}"
        try:
            address = self._result(self._actor.offer.remote(self._owner, same_node=same_node))
            where += "" if same_node else f" at {address[0]}, port {address[1]}"
            with connect(address, self._token, self._shared if same_node else ()) as connection:
                greeting = json.dumps({"number": self._request.number, "shares_memory": same_node}).encode()
                socket.send_fds(self._server, [greeting], [connection.fileno()])
        except OSError as error:  # a network may let Ray's own connections through, and no others
            self._ends = True  # an actor that cannot be reached is of no use, detached or not
            raise ConnectionError(f"no connection to {where}: {one_line(error)}; {REACH}") from error
        return (self._request.request_bytes, self._request.result_bytes) if same_node else (0, 0)

    def _close_shared(self) -> None:
        while self._shared:
            os.close(self._shared.pop())

    def _place(self) -> None:
        """Make the actor; return when it has a place. Raises what Ray raises."""
        alone = self._request.placement != "spread"  # then the place depends on where the others are
        while alone and not self._cluster.placing.acquire(timeout=LOOK_EVERY):
            self._check_server()
            self._tell_waiting()
        try:
            self._actor = self._make()
            placed = self._actor.placement.remote()
            began = time.monotonic()
            while not ray.wait([placed], timeout=LOOK_EVERY)[0]:
                self._check_server()
                if time.monotonic() - began > PATIENCE:
                    self._tell_waiting()
            self._is_ours = not self._request.detached
            if self._request.detached and not self._taken_over():
                placed = self._actor.placement.remote()
            (place,) = FrameParser().feed(self._result(placed))
            assert isinstance(place, WorkerPlaced)
            place = msgspec.structs.replace(place, taken_over=self._owner > 1)
            self._node = place.node
            self._cluster.placed(self, self._request.group, place.node)
        finally:
            if alone:
                self._cluster.placing.release()
        self._send(encode_control(place))

    def _taken_over(self) -> bool:
        """Take the detached actor over, whether it is new or was left by an earlier server; put another in its place if it is not what this server
        wants, and return False then. Raises RuntimeError if it has another server."""
        refusal, self._owner = self._result(self._adopt())
        if refusal == "serves":
            self._actor = None  # so that it is not ended
            name, label = self._request.detached, self._request.label
            raise RuntimeError(
                f"another server has the actor {label!r} that is detached as {name!r}; stop that one, or give this one another --ray-detached"
            )
        self._is_ours = True
        if not refusal:
            return True
        end_actor(self._actor)
        self._actor = self._make()
        while (made := self._adopt()) and not self._is_there(made):
            self._actor = self._make()  # the name is free only when the one before is gone
        _, self._owner = ray.get(made)
        return False

    def _adopt(self) -> Any:
        return self._actor.adopt.remote(self._request.version, self._token)

    def _is_there(self, call: Any) -> bool:
        try:
            self._result(call)
        except ray.exceptions.RayActorError:
            time.sleep(SOON)
            return False
        return True

    def _result(self, call: Any) -> Any:
        """Return the result of a call of the actor. Raises _ServerLeft if the server leaves meanwhile."""
        while not ray.wait([call], timeout=LOOK_EVERY)[0]:
            self._check_server()
        return ray.get(call)

    def _make(self) -> Any:
        request = self._request
        resources = dict(request.resources)
        options: dict[str, Any] = {
            "num_cpus": request.num_cpus,
            "num_gpus": request.num_gpus,
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_restarts": 0,
            "max_concurrency": CALLS,
            **self._cluster.strategy(request),
        }
        if request.runtime_env:
            options["runtime_env"] = request.runtime_env
        if request.detached:
            options |= {
                "name": request.label,
                "namespace": namespace_of(request.detached),
                "lifetime": "detached",
                "get_if_exists": True,
            }
        return ray.remote(WorkerActor).options(**options).remote(request.version, self._token)

    def _tell_waiting(self) -> None:
        lack = self._cluster.lack(self._request)
        if lack:
            self._send(encode_control(WorkerWaits(lack)))

    def _check_server(self) -> None:
        """Raise _ServerLeft if the server has closed the socket."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        if poll.poll(0):
            raise _ServerLeft

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    # Called in Ray's own thread, when a call has returned.

    def _listen(self) -> None:
        self._call("listen", self._owner).add_done_callback(self._heard)

    def _heard(self, call: "Future[bool]") -> None:
        if self._over:  # whoever asks again has a detached actor
            return
        try:
            if not call.result():
                self._ends = True  # its model is unloaded
                raise ConnectionError("it has stopped")
        except BaseException as error:
            self._lost(error)
        else:
            self._listen()

    def _loaded(self, call: "Future[bytes]") -> None:
        try:
            frame = call.result()
        except BaseException as error:
            self._lost(error)
        else:
            self._loading = False
            self._send(frame)

    def _lost(self, error: BaseException) -> None:
        if self._over:
            return
        self._over = True
        reason = one_line(error)
        if self._loading:
            reason = f"{reason.rstrip('.')}; it died while it loaded the model: {REMEDY}"
        self._send(encode_control(WorkerEnded(reason)))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread

    def _send(self, frame: bytes | bytearray) -> None:
        with self._sending, contextlib.suppress(OSError):  # the server has left
            self._socket.sendall(frame)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
