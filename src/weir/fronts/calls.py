"""gRPC with several fronts: they listen on one port, and response ModelInfer for models whose requests they read. All other calls go on to the dispatcher.

The dispatcher has a gRPC server for them on a socket of its own, which takes no other calls.
"""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weir.errors import CapacityError, ModelNotFound, Unauthorized
from weir.frontends.grpc import GrpcSettings, make_frontend
from weir.frontends.grpc.aio import Relay, take_peer
from weir.frontends.grpc.call import IncomingCall
from weir.frontends.grpc.inference import UnaryCall, UnaryInference
from weir.frontends.grpc.server import Admit, Certificate, GrpcServer, certificate_of, credentials_of
from weir.frontends.grpc.services import INFERENCE, Services
from weir.protocols import HttpSettings
from weir.protocols.exchange import Exchange, PassedOn
from weir.protocols.kserve import KserveContext
from weir.protocols.offloading import LONG_BODY
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_json import REGION

T = TypeVar("T")

_INFER = f"/{INFERENCE}/ModelInfer"
_REGION = REGION.encode()


class FrontCalls(NamedTuple):
    """Tells a front how to serve gRPC. It listens as `settings` say, with TLS if there is a `certificate`; `target` and `secret` are the dispatcher's.

    `added` are the paths of a product's calls, each with whether the call takes a stream.
    """

    settings: GrpcSettings
    target: str
    secret: str
    certificate: Certificate | None
    added: tuple[tuple[str, bool], ...] = ()


class DispatcherGrpc(GrpcServer):
    """The gRPC server of a dispatcher, whose fronts listen. `reserve` is called before they start."""

    has_clients = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._secret = secrets.token_hex(32)
        self.own_address = f"unix-abstract:weir-{secrets.token_hex(16)}"
        self._reserved: list[socket.socket] = []
        self._fronts_drained = asyncio.Event()

    async def reserve(self, bind: Callable[[str, int], Awaitable[list[socket.socket]]]) -> FrontCalls:
        """Bind the port at which the fronts will listen, and return what they must know. Raises SettingsError if another server has it."""
        try:
            self._reserved = await bind(self._host, self._settings.grpc_port or 0)
        except OSError:
            raise self.taken() from None
        self.port = self._reserved[0].getsockname()[1]
        settings = GrpcSettings(**{**vars(self._settings), "grpc_host": self._host, "grpc_port": self.port})
        made = {} if self._added is None else self._added(self._settings.grpc_stream_requests).handlers
        added = tuple((path, handler.takes_stream) for path, handler in made.items())
        return FrontCalls(settings, self.own_address, self._secret, certificate_of(self._http), added)

    def credentials(self) -> None:
        """Return None: the fronts end TLS."""

    def admission(self, services: Services) -> Admit:
        """See GrpcServer. Calls of other processes than the server's own are refused."""

        def admit(path: str, call: IncomingCall) -> bool:
            if take_peer(call, self._secret):
                return services.admit(path, call)
            services.refuse_with(Unauthorized("this socket is for the server's own processes"), call)
            return False

        return admit

    def fronts_drained(self) -> None:
        """Note that the fronts pass on no more calls."""
        self._fronts_drained.set()

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """See GrpcServer. Until the fronts have drained, they pass calls on, which must get their refusals."""
        await self._fronts_drained.wait()
        return await super().drain(drain_timeout)

    async def stop(self) -> None:
        """See GrpcServer."""
        await super().stop()
        while self._reserved:
            self._reserved.pop().close()


class FrontCall(UnaryCall):
    """One call of ModelInfer in a front. `pass_on` passes what the front cannot answer on to the dispatcher."""

    def __init__(
        self, incoming: IncomingCall, body: bytes, *, pass_on: Callable[[IncomingCall, bytes], None], development: bool
    ) -> None:
        super().__init__(incoming, body, development=development)
        self._pass_on = pass_on

    def read(self, size_bytes: int, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """See InferenceCall. The dispatcher reads long messages, and those with tensors in its regions of shared memory."""
        if size_bytes > LONG_BODY or _REGION in self.body:
            self.pass_on()
        else:
            super().read(size_bytes, work, then)

    def infer(self, exchange: Exchange, request: InferenceRequest, write: Callable[[InferenceResponse], Any]) -> None:
        """Pass the call on: a request that is not one entry of a queue is the dispatcher's."""
        self.pass_on()

    def pass_on(self) -> None:
        """Have the dispatcher respond."""
        self._pass_on(self.incoming, self.body)

    def fail(self, error: Exception) -> None:
        """Send the error, or pass the call on if the dispatcher may know more."""
        if isinstance(error, PassedOn) or (isinstance(error, (ModelNotFound, CapacityError)) and not error.reported):
            self.pass_on()
        else:
            super().fail(error)


class FrontGrpc(GrpcServer):
    """The gRPC server of a front, made as a GrpcServer from what `calls` says."""

    shares_port = True

    def __init__(self, calls: FrontCalls, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = calls
        self._relay = Relay(calls.target, calls.secret, development=self._http.development)

    def credentials(self) -> Any:
        """See GrpcServer."""
        return credentials_of(self._calls.certificate)

    def make_services(self) -> Services:
        """See GrpcServer. All calls but ModelInfer are passed on."""
        relay, development = self._relay, self._http.development
        pass_on = relay.handler(_INFER, takes_stream=False).begin
        services = Services(
            self._context,
            self._settings.grpc_stream_requests,
            development=development,
            inference=UnaryInference(self._context, partial(FrontCall, pass_on=pass_on, development=development)),
        )
        for path, handler in services.handlers.items():
            if path != _INFER:
                services.handlers[path] = relay.handler(path, takes_stream=handler.takes_stream)
        services.handlers |= {path: relay.handler(path, takes_stream=takes) for path, takes in self._calls.added}
        return services

    async def stop(self) -> None:
        """See GrpcServer."""
        await super().stop()
        await self._relay.stop()


def front_server(calls: FrontCalls, context: KserveContext, http: HttpSettings) -> FrontGrpc:
    """Return the gRPC server of a front, not started."""
    server = make_frontend(context, calls.settings, http, kind=lambda: partial(FrontGrpc, calls))
    assert isinstance(server, FrontGrpc)
    return server
