"""ModelInfer: one request, one answer."""

from functools import partial
from typing import Any

from weir.errors import Draining, WeirError
from weir.messages import Dispatch, RequestBase
from weir.protocols.contents import response_of
from weir.protocols.grpc.call import Call, Trailers
from weir.protocols.grpc.calls import DOOR, in_task, refuse
from weir.protocols.grpc.core import Handler
from weir.protocols.grpc.exchange import Exchange, read, read_long
from weir.protocols.inferring import infer, works_for_one_answer
from weir.protocols.kserve.site import Site
from weir.protocols.offloading import LONG_BODY
from weir.protocols.payloads import Work
from weir.telemetry.tracecontext import HEADER
from weir.wire.kserve_grpc import bytes_to_read


class Inferred(RequestBase):
    """One call in the line: it needs no task, for whatever happens to it ends it."""

    __slots__ = ("_development", "_exchange", "_received_bytes")

    def __init__(
        self, exchange: Exchange, work: Work, timeout: float, priority: int, received_bytes: int, *, development: bool
    ) -> None:  # fmt: skip
        super().__init__(
            work.payload, exchange.service.now(), timeout, kind=work.kind, content_type=work.content_type,
            accept=work.accept, rows=work.rows, cost=work.cost, key=work.key, priority=priority, large=work.large,
            door=DOOR,
        )  # fmt: skip
        self._exchange = exchange
        self._received_bytes = received_bytes
        self._development = development

    def submit(self) -> None:
        """Go into the line, and out of it when the caller leaves. Raises what Service.submit raises."""
        self._exchange.call.on_left = self._withdraw
        self._exchange.service.submit(self, self.arrival)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Answer."""
        exchange = self._exchange
        try:
            answer = exchange.write(response_of(exchange.service, exchange.request, [self.kind], [output]))
        except Exception as error:
            refuse(error, exchange.call, development=self._development)
        else:
            exchange.call.end(body=answer)
            exchange.transferred(self._received_bytes, len(answer))

    def fail(self, error: WeirError) -> None:
        """Refuse."""
        refuse(error, self._exchange.call, development=self._development)

    def _withdraw(self) -> None:
        self._exchange.service.cancel(self)


class Inference:
    """The handler of ModelInfer. Set `refusing` when no more requests are taken."""

    def __init__(self, site: Site, *, development: bool) -> None:
        self._site = site
        self._development = development
        self.refusing = False

    def handler(self) -> Handler:
        """Return what gRPC calls."""
        return Handler(self._begin)

    def _begin(self, call: Call, body: bytes) -> None:
        if call.over:
            return
        try:
            if self.refusing:
                raise refusal()
            if len(body) > LONG_BODY and bytes_to_read(body) > LONG_BODY:
                in_task(self._read_long, development=self._development)(call, body)
                return
            exchange = Exchange(self._site, call, *read(self._site, call, body))
            service = exchange.service
            if service.tracing is not None or service.needs_measure or service.deputy is not None:
                in_task(partial(self._infer, exchange), development=self._development)(call, body)
                return
            limit = call.time_remaining()
            (work,), timeout, priority = works_for_one_answer(service, exchange.request, DOOR, limit)
            Inferred(exchange, work, timeout, priority, len(body), development=self._development).submit()
        except Exception as error:
            refuse(error, call, development=self._development)

    async def _read_long(self, call: Call, body: bytes) -> None:
        await self._infer(Exchange(self._site, call, *await read_long(self._site, call, body)), call, body)

    async def _infer(self, exchange: Exchange, call: Call, body: bytes) -> None:
        """Answer where one request may become several, its log lines carry a trace, or it was read in a thread."""
        trailers: Trailers = ()
        try:
            trace = exchange.trace()
            if trace is not None:
                trailers = ((HEADER, trace.traceparent),)
            limit = call.time_remaining()
            response = await infer(exchange.service, exchange.request, door=DOOR, timeout=limit, trace=trace)
            answer = exchange.write(response)
        except Exception as error:
            refuse(error, call, trailers, development=self._development)
        else:
            call.end(trailers=trailers, body=answer)
            exchange.transferred(len(body), len(answer))


def refusal() -> Draining:
    """Return the error of whoever comes when no more are taken."""
    return Draining("the server is being stopped and takes no more requests", retry_after=1.0)
