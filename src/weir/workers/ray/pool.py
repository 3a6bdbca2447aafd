"""Ray actors as an Executor, on the side of the server: one ActorChild for each, and the connection to the process that speaks with Ray.

    server ──socket per worker──> driver process (driver.py) ──calls──> actor (actor.py), on any node
       └─────────────batches, and responses (connection.py)─────────────┘

Nothing here imports Ray. A batch's frame is the same as for a worker process, and so is all else that supervision does: time limits, retries of the
start, and the count of batches.
"""

import asyncio
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from weir._version import __version__
from weir.errors import SettingsError, add_extra
from weir.model import Model
from weir.wire.frames import (
    Frame,
    FrameParser,
    Ready,
    Start,
    StartFailed,
    WorkerEnded,
    WorkerPlaced,
    WorkerWaits,
    encode_control,
)
from weir.workers.local import refuse_settings
from weir.workers.process.channel import Channel
from weir.workers.process.launch import Launch, Popen, python_path, start_process, when_gone
from weir.workers.process.pool import ProcessPool
from weir.workers.process.supervision import ChannelWithResults, ChildListener
from weir.workers.settings import WorkerSettings
from weir.workers.source import parse_target
from weir.workers.timer import end_tasks, outcome_of

logger = logging.getLogger("weir")

END_GRACE = 10.0  # seconds for Ray to end what it has started
# Seconds after the end of the connection to an actor until it counts as lost, if Ray has not said why.
REASON_GRACE = 1.0
MESSAGE_BYTES = 128 << 10


class RayLink:
    """The process that speaks with the Ray at `address`, for all models of this event loop that use it with the same runtime environment. It is
    started for the first one, again when it has ended, and ended with the last one.

    Attributes:
        reason: why there is no connection; "" if there is one, or has never been.
    """

    _all: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str, str], "RayLink"]] = {}

    def __init__(self, address: str, runtime_env: str) -> None:
        self.address = address
        self._runtime_env = runtime_env
        self.reason = ""
        self._loop = asyncio.get_running_loop()
        self._users = 0
        self._children: dict[int, ActorChild] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._popen: Popen | None = None
        self._socket: socket.socket | None = None

    @classmethod
    def shared(cls, address: str, runtime_env: str = "{}") -> "RayLink":
        """Return the link of this event loop to `address`, with this runtime environment (JSON), for one more user."""
        key = asyncio.get_running_loop(), address, runtime_env
        link = cls._all.get(key)
        if link is None:
            link = cls._all[key] = cls(address, runtime_env)
        link._users += 1
        return link

    async def release(self) -> None:
        """Have one user less; end the process with the last one."""
        self._users -= 1
        if self._users == 0:
            self._all.pop((self._loop, self.address, self._runtime_env), None)
            await end_tasks(self._connecting)
            await self._close()

    async def connect(self) -> None:
        """Return when there is a connection. Raises OSError with the reason if there can be none now."""
        if self._socket is not None and self._connecting is None:
            return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
        await outcome_of(self._connecting)

    def attach(self, child: "ActorChild", request: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Have an actor made for `child`. Raises OSError if the connection is gone."""
        if self._socket is None:
            raise ConnectionError(self.reason or "there is no connection to Ray")
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        self._children[child.number] = child

    def end_detached(self, number: int) -> None:
        """Have the actor with this number ended, although it is detached."""
        self._tell({"end": number})

    def sweep(self, detached: str, model: str, first: int) -> None:
        """End the actors of `model` from the index `first` on that an earlier server has left under the name `detached`."""
        self._tell({"sweep": {"detached": detached, "model": model, "first": first}})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            self._socket.send(json.dumps(message).encode())

    def detach(self, child: "ActorChild") -> None:
        """Forget `child`, which has ended."""
        self._children.pop(child.number, None)

    async def _connect(self) -> None:
        try:
            connected = await self._started()
        except BaseException as error:
            self.reason = str(error) or type(error).__name__
            await self._close()
            raise
        finally:
            self._connecting = None
        self.reason = ""
        assert self._socket is not None
        self._loop.add_reader(self._socket.fileno(), self.receive)
        _announce(self.address, connected)

    async def _started(self) -> dict[str, Any]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: asyncio.Future[Popen | OSError] = self._loop.create_future()
        try:
            ours.setblocking(False)
            self._socket = ours
            # -P: see launch.command
            arguments = [sys.executable, "-P", "-m", "weir.workers.ray.driver", str(os.getpid()), str(theirs.fileno())]
            environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
            start_process(arguments, environment, [theirs.fileno()], started.set_result)
            popen = await started
        finally:
            theirs.close()
        if isinstance(popen, OSError):
            raise popen
        self._popen = popen
        request = {"address": self.address or "local", "runtime_env": json.loads(self._runtime_env)}
        await self._loop.sock_sendall(ours, json.dumps(request).encode())
        data = await self._loop.sock_recv(ours, MESSAGE_BYTES)
        reply: dict[str, Any] = json.loads(data) if data else {"refused": "the process that speaks with Ray has ended"}
        if "refused" in reply:
            raise ConnectionError(reply["refused"])
        return reply

    def receive(self) -> None:
        """Pass on the connections to actors that have come."""
        while self._socket is not None and self._connecting is None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._ended(self._socket)
                return
            self._pass_on(json.loads(data), descriptors)

    def _pass_on(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        child = self._children.get(message["number"])
        os.set_inheritable(descriptors[0], False)
        connection = socket.socket(fileno=descriptors[0])
        if child is None:
            connection.close()
        else:
            child.connected(connection, shares_memory=message["shares_memory"])

    def _ended(self, ours: socket.socket) -> None:
        """Act on the end of the process: Ray ends the process of a driver that it has lost."""
        self._loop.remove_reader(ours.fileno())
        self.reason = "the connection to Ray is lost"
        for child in list(self._children.values()):
            child.kill(self.reason)
        self._closing = self._loop.create_task(self._close())

    async def _close(self) -> None:
        """Close the socket, which ends the process; kill it after the grace."""
        ours, self._socket = self._socket, None
        popen, self._popen = self._popen, None
        if ours is not None:
            self._loop.remove_reader(ours.fileno())
            ours.close()
        if popen is None:
            return
        gone: asyncio.Future[None] = self._loop.create_future()
        killer = self._loop.call_later(END_GRACE, popen.kill)
        when_gone(popen, gone, self._loop, END_GRACE + 5.0)
        await gone
        killer.cancel()


def _announce(address: str, connected: dict[str, Any]) -> None:
    has = ", ".join(
        f"{name} {amount:g}" for name, amount in sorted(connected["resources"].items()) if name in ("CPU", "GPU")
    )
    if address:
        nodes = connected["nodes"]
        logger.info(
            "connected to Ray %s at %s: %d node%s, %s",
            connected["version"],
            connected["address"],
            nodes,
            "s" * (nodes != 1),
            has,
        )
    else:
        logger.warning(
            "no Ray address was given (--ray-address), so Ray was started on this machine only: %s; it stops with this server",
            has,
        )


class ActorChild(ChannelWithResults):
    """One actor of a worker, from its start to its end. Its `owner` is notified of its frames and its end (see WorkerChild).

    Attributes:
        number: its own, for the link.
        shares_memory: whether the actor reaches the arenas of this machine.
    """

    def __init__(
        self, launch: Launch, owner: ChildListener, loop: asyncio.AbstractEventLoop, link: RayLink, pool: "RaySpawner"
    ) -> None:
        super().__init__()
        self._launch = launch
        self._link = link
        self._pool = pool
        self._owner = owner
        self._loop = loop
        self._control: Channel[Frame] | None = None  # to the process that speaks with Ray
        self._giving_up: asyncio.TimerHandle | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._over = False
        self._reason = ""
        self._waiting = ""  # why it has no place yet
        self._attached = False
        self._ready = False
        self.number = next(_numbers)
        self.shares_memory = True
        self.pid: int | None = None

    def start(self) -> None:
        """Have the actor made. The owner is notified if that is refused."""
        self._attaching = self._loop.create_task(self._attach())

    def connected(self, connection: socket.socket, *, shares_memory: bool) -> None:
        """Send batches to the actor by this `connection` from now on."""
        if self._over:
            connection.close()
            return
        self.shares_memory = shares_memory
        parser = self._make_parser(lends=self._launch.lends) if shares_memory else FrameParser()
        self._channel = Channel(connection, parser, self._owner.received, self._connection_ended)
        self._channel.open(self._loop)

    def kill(self, reason: str = "") -> None:
        """End the actor, also if it is detached: close the socket, and tell the owner soon."""
        if self._attached and not self._over and self._launch.settings.ray_detached:
            self._link.end_detached(self.number)
        self._end(f"{reason}: {self._waiting}" if self._waiting else reason or "it was ended")

    async def _attach(self) -> None:
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno()]
        result_fd = -1
        try:
            await self._link.connect()
            launch = self._launch
            if launch.request_fd >= 0:
                descriptors.append(launch.request_fd)
            result_fd = self._make_results(launch)
            if result_fd >= 0:
                descriptors.append(result_fd)
            self._link.attach(self, self._request(), descriptors)
            self._attached = True
        except OSError as error:
            ours.close()
            self._refused(error)
            return
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if result_fd >= 0:
                os.close(result_fd)
        self._control = Channel(ours, self._make_parser(lends=self._launch.lends), self._received, self._end)
        self._channel = self._control
        self._control.open(self._loop)
        self._control.send(encode_control(Start(self._launch.source, self._launch.options())))

    def _request(self) -> dict[str, Any]:
        launch, settings = self._launch, self._launch.settings
        variables = launch.variables()
        environment = {"env_vars": variables} if variables else {}
        request = {
            "group": self._pool.group,
            "label": f"{launch.name}/{launch.index}",
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.num_gpus,
            "resources": settings.resources,
            "placement": settings.placement,
            "runtime_env": environment,
            "request_bytes": launch.request_bytes if launch.request_fd >= 0 else 0,
            "result_bytes": launch.result_bytes,
        }
        if not settings.ray_detached:
            return {"number": self.number} | request
        what = [request | {"group": ""}, launch.options(), settings.ray_runtime_env, __version__]
        version = hashlib.sha256(
            launch.source + self._pool.code + json.dumps(what, sort_keys=True).encode()
        ).hexdigest()
        return {"number": self.number, "detached": settings.ray_detached, "version": version} | request

    def _received(self, frame: Frame) -> None:
        if isinstance(frame, WorkerEnded):
            self._reason = frame.reason
        else:
            if isinstance(frame, WorkerWaits):
                self._waiting = frame.reason
            elif isinstance(frame, WorkerPlaced):
                self.pid, self._waiting = frame.pid, ""
            elif isinstance(frame, Ready):
                self._ready = True
                self._link.receive()  # the connection was sent before this frame
            self._owner.received(frame)
            if isinstance(frame, StartFailed):  # a process would end by itself
                self.kill("it did not load")

    def _refused(self, error: OSError) -> None:
        self._attaching = None
        if not self._over:
            self._over = True
            self._close()
            where = self._link.address or "this machine"
            self._owner.refused(f"no Ray can be reached at {where}: {error}", unreachable=True)

    def _connection_ended(self, reason: str) -> None:
        """Wait a moment for Ray to tell why; while it loads, as long as that takes."""
        if self._ready and not self._over:
            self._owner.disconnected()
            self._giving_up = self._loop.call_later(REASON_GRACE, self._end, reason)

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self.receive()  # what it sent before its end
            self._close()
            self._loop.call_soon(self._owner.exited, self._reason or reason)

    def _close(self) -> None:
        self._link.detach(self)
        if self._attaching is not None and self._control is None:
            self._attaching.cancel()
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self._control is not None:
            self._control.close()
        self._close_ours()


_numbers = count()


class RaySpawner:
    """Starts the workers of one pool as actors of Ray. See Spawner.

    Attributes:
        group: its own, for the placement of its actors.
    """

    def __init__(self, model: type[Model] | str, settings: WorkerSettings, name: str) -> None:
        self.group = f"{os.getpid()}-{next(_numbers)}"
        self._model = model
        self._settings = settings
        self._name = name
        self._address = settings.ray_address or os.environ.get("RAY_ADDRESS", "")
        self._link: RayLink | None = None
        if settings.ray_detached and not self._address:
            raise SettingsError(
                f"ray_detached={settings.ray_detached!r}: a Ray that is started for this server ends with it; give the address of another (ray_address)"
            )

    @cached_property
    def code(self) -> bytes:
        """The content of the model's file, as far as there is one: a detached actor with other code is not the same."""
        if isinstance(self._model, str):
            named = parse_target(self._model)
            spec = None if named.file else find_spec(named.module)
            file = named.file or (spec and spec.origin)
        else:
            file = getattr(sys.modules.get(self._model.__module__), "__file__", None)
        try:
            return Path(file or "").read_bytes()
        except OSError:
            return b""

    async def open(self) -> None:
        """Connect to Ray. Raises SettingsError if there is none."""
        self._link = RayLink.shared(self._address, self._settings.ray_runtime_env or "{}")
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                await self._link.connect()
        except TimeoutError:
            limit = self._settings.start_timeout
            what = "Ray has not answered" if self._address else "no Ray could be started on this machine"
            encrypted = (
                "; if its nodes use TLS, set RAY_USE_TLS=1 and the RAY_TLS_ variables here too" if self._address else ""
            )
            raise SettingsError(
                f"ray_address={self._address!r}: {what} within start_timeout={limit}{encrypted}"
            ) from None
        except OSError as error:
            if not self._address:
                raise SettingsError(
                    f"no Ray could be started on this machine (ray_address names one that runs): {error}"
                ) from error
            raise SettingsError(f"ray_address={self._address!r}: {error}") from error
        if self._settings.ray_detached:
            self._link.sweep(self._settings.ray_detached, self._name, self._settings.first_workers)

    def spawn(self, launch: Launch, owner: ChildListener, loop: asyncio.AbstractEventLoop) -> ActorChild:
        """See Spawner."""
        assert self._link is not None  # `open` has made it
        return ActorChild(launch, owner, loop, self._link, self)

    async def close(self) -> None:
        """Leave the connection to the other models."""
        link, self._link = self._link, None
        if link is not None:
            await link.release()


class RayExecutor(ProcessPool):
    """Runs each worker of a model as an actor of Ray. See the Executor protocol, and ProcessPool for the arguments.

    Where no address is set, the variable RAY_ADDRESS says where Ray is; without it a Ray is started on this machine, which ends with the last model.
    An actor that has ended, with its node or without, is placed again where there is room. When Ray is gone altogether, the model is unavailable
    until it is back.
    """

    def __init__(
        self,
        model: type[Model] | str,
        params: dict[str, Any],
        settings: WorkerSettings,
        *,
        name: str,
        max_batch_size: int,
    ) -> None:
        if find_spec("ray") is None:
            raise SettingsError(f"executor='ray': Ray is not installed; {add_extra('ray')}")
        refuse_settings(settings, ("cpu_affinity",))
        spawner = RaySpawner(model, settings, name)
        super().__init__(model, params, settings, name=name, max_batch_size=max_batch_size, spawner=spawner)
