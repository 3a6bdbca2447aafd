"""ModelInfer: one request, one answer."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from weir.batching.request_state import RequestBase
from weir.errors import Draining, WeirError
from weir.messages import Dispatch
from weir.model import is_tensor_model
from weir.protocols.exchange import Exchange
from weir.protocols.grpc.call import Call, Trailers
from weir.protocols.grpc.calls import DOOR, in_task, refuse
from weir.protocols.grpc.core import Handler
from weir.protocols.grpc.exchange import GrpcExchange, Writing, read, read_long
from weir.protocols.grpc.forms import Form, Forms
from weir.protocols.kserve.context import KServeContext
from weir.protocols.metadata import find
from weir.protocols.offloading import LONG_ANSWER, LONG_BODY, work_later
from weir.serving.inference import QueueEntry, entries_for_one_answer, response_of
from weir.telemetry.tracecontext import HEADER
from weir.wire.kserve_grpc import bytes_to_read

if TYPE_CHECKING:
    pass


class Inferred(RequestBase):
    """One call in the line: it needs no task, for whatever happens to it ends it. `respond` makes of its output the body of its
    answer, or what is to write that."""

    __slots__ = ("_call", "_development", "_exchange", "_received_bytes", "_respond")

    def __init__(
        self, call: Call, exchange: Exchange, work: QueueEntry, timeout: float, priority: int, received_bytes: int,
        respond: Callable[[Any], bytes | Writing], *, development: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            work.payload, exchange.service.now(), timeout, kind=work.kind, content_type=work.content_type,
            accept=work.accept, rows=work.rows, cost=work.cost, key=work.key, priority=priority, large=work.large,
            door=DOOR,
        )  # fmt: skip
        self._call = call
        self._exchange = exchange
        self._received_bytes = received_bytes
        self._respond = respond
        self._development = development

    def submit(self) -> None:
        """Go into the line, and out of it when the caller leaves. Raises what Service.submit raises."""
        self._call.on_left = self._withdraw
        self._exchange.service.submit(self, self.arrival)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Answer; a long answer is written in a thread."""
        try:
            answer = self._respond(output)
            if isinstance(answer, Writing):
                if answer.size_bytes > LONG_ANSWER:
                    self._call.charge(answer.size_bytes)
                    self._call.on_left = work_later(*answer, self._written, writes=True)
                    return
                answer = answer.write()
        except Exception as error:
            refuse(error, self._call, development=self._development)
        else:
            self._written(answer)

    def _written(self, answer: bytes | Exception) -> None:
        if isinstance(answer, Exception):
            refuse(answer, self._call, development=self._development)
        else:
            self._call.end(body=answer)
            self._exchange.transferred(self._received_bytes, len(answer))

    def fail(self, error: WeirError) -> None:
        """Refuse."""
        refuse(error, self._call, development=self._development)

    def _withdraw(self) -> None:
        self._exchange.service.cancel(self)


class Inference:
    """The handler of ModelInfer. Set `refusing` when no more requests are taken."""

    def __init__(self, site: KServeContext, *, development: bool) -> None:
        self._site = site
        self._development = development
        self._forms = Forms()
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
            form = self._forms.find(body)
            if form is None or not self._begin_known(form, call, body):
                self._begin_any(call, body)
        except Exception as error:
            refuse(error, call, development=self._development)

    def _begin_known(self, form: Form, call: Call, body: bytes) -> bool:
        """Submit a request of a known form; tell whether it is of the model that is served now."""
        service = find(self._site.registry, form.model, form.version)
        if not form.serves(service):
            return False
        work = form.work._replace(payload=form.arrays(body))
        limit, timeout = call.time_remaining(), service.settings.timeout
        timeout = timeout if limit is None or limit > timeout else limit
        respond = partial(form.respond, service)
        exchange = Exchange(service, door=DOOR)
        Inferred(call, exchange, work, timeout, 0, len(body), respond, development=self._development).submit()
        return True

    def _begin_any(self, call: Call, body: bytes) -> None:
        if len(body) > LONG_BODY and bytes_to_read(body) > LONG_BODY:
            in_task(self._read_long, development=self._development)(call, body)
            return
        exchange = GrpcExchange(self._site, call, *read(self._site, call, body))
        service, request = exchange.service, exchange.request
        if service.tracing is not None or not service.inference.queues_tensors(service):
            in_task(partial(self._infer, exchange), development=self._development)(call, body)
            return
        (work,), timeout, priority = entries_for_one_answer(service, request, DOOR, exchange.timeout)

        def respond(output: Any) -> Writing:
            return exchange.writing(response_of(service, request, [work.kind], [output]))

        Inferred(call, exchange, work, timeout, priority, len(body), respond, development=self._development).submit()
        if is_tensor_model(service.model):
            self._forms.learn(body, request, service, work)

    async def _read_long(self, call: Call, body: bytes) -> None:
        await self._infer(GrpcExchange(self._site, call, *await read_long(self._site, call, body)), call, body)

    async def _infer(self, exchange: GrpcExchange, call: Call, body: bytes) -> None:
        """Answer where one request may become several, its log lines carry a trace, or it was read in a thread."""
        trailers: Trailers = ()
        try:
            trace = exchange.begin_trace()
            if trace is not None:
                trailers = ((HEADER, trace.traceparent),)
            response = await exchange.infer(exchange.request)
            answer = await exchange.write(response)
        except Exception as error:
            refuse(error, call, trailers, development=self._development)
        else:
            call.end(trailers=trailers, body=answer)
            exchange.transferred(len(body), len(answer))


def refusal() -> Draining:
    """Return the error of whoever comes when no more are taken."""
    return Draining("the server is being stopped and takes no more requests", retry_after=1.0)
