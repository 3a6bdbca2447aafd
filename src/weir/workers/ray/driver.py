"""The process that speaks with Ray for a server: `python -m weir.workers.ray.driver`. In Ray's words it is a driver.

It is a process of its own because Ray ends the process of a driver that has lost its cluster, blocks its threads meanwhile, and takes its signals. The
server sends it one message to connect, and one for each worker, with the worker's socket (pool.py). From then on each worker has a thread here, which
makes the actor, connects it with the server (connection.py), and ends the actor when the socket is closed. Batches for which there is no such connection
come through the worker's socket, and this process makes calls of the actor of them. When this process ends, in whatever way, Ray ends its actors.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np
import ray

from weir.messages import Batch
from weir.wire.cells import Ref, Stowed
from weir.wire.frames import (
    Cancel,
    FrameError,
    FrameParser,
    Free,
    RawFrame,
    RawParser,
    Stop,
    WorkerEnded,
    WorkerLeaves,
    WorkerPlaced,
    WorkerWaits,
    encode_control,
    relocated,
)
from weir.workers.arena import Arena, ResultPlaces
from weir.workers.arena import Mapping as SharedMapping
from weir.workers.process.channel import RECEIVE_BYTES
from weir.workers.process.entry import ignore_terminal_signals, prepare
from weir.workers.ray.actor import NUMBER, OWNER_BITS, RENEWAL, Parcel, WorkerActor
from weir.workers.ray.connection import TOKEN_BYTES, connect

MESSAGE_BYTES = 128 << 10  # the longest message of the server
PROBE = 3.0  # seconds to find out whether anything listens at an address
END_GRACE = 5.0  # seconds for a detached actor to unload its model
PATIENCE = 2.0  # seconds without a place after which the worker says why it waits
SOON = 0.1  # seconds to the next try to have an actor of a name that has just ended
LOOK_EVERY = 0.5  # seconds between two looks at a worker without a place, and at nodes that are drained
MAX_REASON = 400  # characters
OTHER_CALLS = 4  # that an actor runs besides batches: listen, cancel, stop and one more

REMEDY = """what it printed is in this log; if its node ran out of memory, ask for more with --resources '{"memory": BYTES}'"""

Resources = dict[str, float]


class ActorRequest(NamedTuple):
    """What the server wants of one worker. `number` is its own for each actor, `group` is equal for the workers of one model; `depth` is how many
    batches it holds. A `detached` one outlives the server, in the namespace of that name; `version`: see WorkerActor."""

    number: int
    group: str
    label: str
    depth: int
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
        """What Ray has to have free on one node."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}


def main(arguments: Sequence[str]) -> int:
    """Serve the server process `arguments[0]` on the inherited socket `arguments[1]`, until it closes the socket; return the exit code."""
    prepare(int(arguments[0]), [], 0)
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
        "address": context.address_info["gcs_address"], "version": ray.__version__, "resources": ray.cluster_resources(),
        "nodes": sum(node["Alive"] for node in ray.nodes()), "seconds": time.monotonic() - started,
    }  # fmt: skip


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
        told: set[HeldActor] = set()
        while True:
            time.sleep(LOOK_EVERY)
            draining = _draining()
            with self._lock:
                held = dict(self._held)
            told &= held.keys()
            for actor, (_, node) in held.items():
                if node in draining and actor not in told:
                    told.add(actor)
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
        self._requests: SharedMapping | None = None  # the arenas, where batches travel by calls
        self._places: ResultPlaces | None = None
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._node = ""
        self._actor: Any = None
        self._first = 0  # the number of the first batch
        self._batches = 0  # the number of the next one
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
        frames = self._frames()
        start = next(frames)
        self._place()
        self._first = self._batches
        self._listen()
        arenas = self._connect()
        if arenas is None:
            self._open_arenas()
        self._close_shared()
        self._loading = True
        self._call("start", self._first, start.data, arenas).add_done_callback(self._loaded)
        for frame in frames:
            self._act(frame)

    def _connect(self) -> tuple[int, int] | None:
        """Connect the server with the actor; return the lengths of the arenas that they share. None, and the server knows why, if there is no connection."""
        same_node = self._node == ray.get_runtime_context().get_node_id()
        message: dict[str, Any] = {"number": self._request.number}
        where = f"node {self._node[:8]}"
        try:
            address = self._result(self._actor.offer.remote(self._first, same_node=same_node))
            where += "" if same_node else f" at {address[0]}, port {address[1]}"
            with connect(address, self._token, self._shared if same_node else ()) as connection:
                told = json.dumps(message | {"shares_memory": same_node}).encode()
                socket.send_fds(self._server, [told], [connection.fileno()])
        except OSError as error:  # a network may let Ray's own connections through, and no others
            self._server.send(json.dumps(message | {"refused": f"{where}: {one_line(error)}"}).encode())
            return None
        return (self._request.request_bytes, self._request.result_bytes) if same_node else (0, 0)

    def _open_arenas(self) -> None:
        given, request = iter(self._shared), self._request
        if request.request_bytes:
            self._requests = SharedMapping(next(given), request.request_bytes, writable=False)
        if request.result_bytes:
            self._places = ResultPlaces(Arena(os.dup(next(given)), request.result_bytes))

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
            place = msgspec.structs.replace(place, taken_over=self._batches >> OWNER_BITS > 1)
            self._node = place.node
            self._cluster.placed(self, self._request.group, place.node)
        finally:
            if alone:
                self._cluster.placing.release()
        self._send(encode_control(place))

    def _taken_over(self) -> bool:
        """Take the detached actor over, whether it is new or was left by an earlier server; put another in its place if it is not what this server
        wants, and return False then. Raises RuntimeError if it has another server."""
        refusal, self._batches = self._result(self._adopt())
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
        _, self._batches = ray.get(made)
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
            "num_cpus": request.num_cpus, "num_gpus": request.num_gpus, "memory": resources.pop("memory", None), "resources": resources,
            "max_restarts": 0, "max_concurrency": request.depth + OTHER_CALLS, **self._cluster.strategy(request),
        }  # fmt: skip
        if request.runtime_env:
            options["runtime_env"] = request.runtime_env
        if request.detached:
            options |= {
                "name": request.label, "namespace": namespace_of(request.detached), "lifetime": "detached", "get_if_exists": True,
            }  # fmt: skip
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

    def _frames(self) -> Iterator[RawFrame]:
        parser = RawParser()
        while data := self._socket.recv(RECEIVE_BYTES):
            yield from parser.feed(data)

    def _act(self, frame: RawFrame) -> None:
        if frame.kind is Batch:
            buffers = [self._payload(ref) for ref in frame.refs]
            number, self._batches = self._batches, self._batches + 1
            more = (frame.refs, *buffers) if buffers else ()
            self._call("run", NUMBER.pack(number) + frame.data, *more).add_done_callback(self._forward)
        elif frame.kind is Cancel:
            self._call("cancel", NUMBER.pack(self._first) + frame.data)
        elif frame.kind is Free and self._places is not None:
            for ref in frame.refs:
                self._places.take_back(ref)
        elif frame.kind is Stop:
            (stop,) = FrameParser().feed(frame.data)
            assert isinstance(stop, Stop)
            self._ends = not stop.keep
            call = self._call("settle", self._first) if stop.keep else self._call("stop")
            call.add_done_callback(self._stopped)

    def _payload(self, ref: Ref) -> Any:
        if self._requests is None:
            raise FrameError(f"reference {ref} into an arena, but no arena exists")
        return np.frombuffer(self._requests.view(*ref), np.uint8)

    def _call(self, method: str, *arguments: Any) -> "Future[Any]":
        future: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        return future

    # Called in Ray's own thread, when a call has returned.

    def _listen(self) -> None:
        self._call("listen", self._first).add_done_callback(self._heard)

    def _heard(self, call: "Future[list[Parcel] | None]") -> None:
        if self._over:  # whoever asks again has a detached actor
            return
        try:
            heard = call.result()
            if heard is None:
                self._ends = True  # its model is unloaded
                raise ConnectionError("it has stopped")
            for parcel in heard:
                self._pass_on(parcel)
        except BaseException as error:
            self._lost(error)
        else:
            self._listen()

    def _forward(self, call: "Future[Any]") -> None:
        try:
            result = call.result()
            self._pass_on((result,) if isinstance(result, bytes) else result)
        except BaseException as error:
            self._lost(error)

    def _loaded(self, call: "Future[Any]") -> None:
        if call.exception() is None:
            self._loading = False
        self._forward(call)

    def _stopped(self, call: "Future[None]") -> None:
        reason = "" if call.exception() is None else one_line(call.exception() or Exception())
        self._lost(Exception(reason or "it has stopped"))

    def _pass_on(self, parcel: Parcel) -> None:
        if parcel:
            frame, *buffers = parcel
            self._send(relocated(frame, self._located(buffers)) if buffers else frame)

    def _located(self, buffers: Sequence[Any]) -> dict[Ref, Stowed]:
        """Return where the buffers of a frame lie in the arena of results; if there is no room for all of them, their bytes."""
        refs = [(number, len(buffer)) for number, buffer in enumerate(buffers)]
        places = self._places
        if places is not None:
            located = [places.place(buffer) for buffer in buffers]
            if None not in located:
                return dict(zip(refs, located, strict=True))  # type: ignore[arg-type]  # there is no None
            for place in located:
                if place is not None:
                    places.take_back(place)
        return {ref: bytes(buffer) for ref, buffer in zip(refs, buffers, strict=True)}

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
