"""The models of the dispatcher as a front knows them: `RemoteModels` for Models, and a `RemoteHandle` for each ModelHandle.

A front has none of the models' code. Of each class it makes a stand-in with the same declarations, from which the protocols read the requests.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from weir.batching import BatchingSettings
from weir.batching.request_state import finish_each, settle
from weir.errors import WeirError, unknown_model
from weir.fronts.messages import (
    FORMS,
    LONGEST_PAYLOAD,
    LONGEST_TEXT,
    PLAIN,
    CallerLeft,
    FailedRequest,
    FromDispatcher,
    Link,
    ModelDescription,
    ModelTable,
    MustHandOver,
    Outputs,
    PlacedOutput,
    Refused,
    RequestForm,
    SentArray,
    SentPayload,
    SentPlace,
    SentText,
    Submit,
    Transferred,
    WantCopy,
    dispatch_of,
    received_error,
    sent_error,
)
from weir.fronts.places import LentPlace, LentPlaces, MemoryReceiver, OutputBlock, OutputReader
from weir.messages import PACKED, Block, Form, Request
from weir.model import Model
from weir.protocols.exchange import Inference
from weir.serving import ServiceSettings
from weir.serving.delivery import Tracer, undelivered
from weir.serving.handle import ModelFacts
from weir.text_models.texts import Tokens
from weir.wire.inference import ArenaArrays
from weir.wire.tensors import Unpacker, head_of_views, pack
from weir.workers.executor import discard

_PLACE_BYTES = 24  # of a place in a frame, about


class Requests:
    """The requests of a front that the dispatcher has, by their numbers."""

    def __init__(self, link: Link[FromDispatcher], outputs: OutputReader) -> None:
        self.link = link
        self._outputs = outputs
        self.open: dict[int, Any] = {}
        self._next = 0  # the number of the next request
        self._forms: dict[tuple[int, Form], int] = {}
        self._last: tuple[int, Form | None, int] = (0, None, 0)  # most requests have the form of the one before
        self._unpack = Unpacker()

    def submit_other(self, handle: "RemoteHandle", request: Any) -> None:
        """Send a request whose payload is not bytes to the queue of the model of `handle`, or have it passed on if that is impossible. Large arrays travel in
        a place of the model's."""
        if isinstance(request.payload, Tokens):
            self._submit_text(handle, request, request.payload)
        elif (found := _sendable(request, handle.places if handle.arena_bytes else None)) is None:
            request.pass_on()
        else:
            sent, is_packed = found
            form = request.form.replaced(content_type=PACKED, accept=PACKED) if is_packed else request.form
            size = len(sent) if type(sent) is bytes else _PLACE_BYTES
            self.send(request, handle.number, form, request.arrival, sent, size)

    def _submit_text(self, handle: "RemoteHandle", text: Any, tokens: Tokens) -> None:
        """Send a text. `limit` of its request has the timeout, and the instant from which that counts."""
        timeout, began = text.limit
        form = text.form.replaced(timeout=timeout, cost=1.0)
        ahead = max(0.0, text.tag - handle.virtual_time())
        sent = SentText(tokens.ids, int(text.form.cost), ahead, text.brief, tokens.second, tokens.outputs)
        self.send(text, handle.number, form, began, sent, len(tokens.ids))

    def send(self, request: Any, model: int, form: Form, arrival: float, payload: SentPayload, size_bytes: int) -> None:
        """Send a request of `form` to `model`, with a `payload` of about `size_bytes` bytes."""
        last = self._last
        known = last[2] if form is last[1] and model == last[0] else self._known(model, form)
        number = request.number = self._next
        self._next = number + 1
        self.open[number] = request
        link = self.link
        run = link.last
        if type(run) is Submit and run.form == known and run.arrivals[-1] <= arrival:
            run.arrivals.append(arrival)
            run.payloads.append(payload)
            link.grew(size_bytes)
        else:
            link.put(Submit(number, known, [arrival], [payload]), size_bytes)

    def _known(self, model: int, form: Form) -> int:
        """Return the number of a form of requests to `model`, which the dispatcher knows from then on."""
        known = self._forms.get((model, form))
        if known is None:
            known = self._send_form(model, form)
        self._last = (model, form, known)
        return known

    def _send_form(self, model: int, form: Form) -> int:
        """Send a form of requests and return its number. Once there are FORMS of them, the numbers are used again from the first."""
        if len(self._forms) >= FORMS:
            self._forms.clear()
        number = self._forms[model, form] = len(self._forms)
        self.link.put(RequestForm(number, model, form))
        return number

    def cancel(self, request: Any) -> None:
        """Withdraw `request`, whose caller has left."""
        if settle(request) and self.open.pop(request.number, None) is not None:
            self.link.put(CallerLeft(request.number))
            _drop(request.payload)

    def answered(self, message: Outputs) -> None:
        """Give several requests their responses."""
        pop = self.open.pop
        requests = [pop(number, None) for number in message.numbers]
        outputs: list[Any] = message.outputs
        if None in requests:  # their callers have left
            ends = [end for end in zip(requests, outputs, strict=True) if end[0] is not None]
            requests, outputs = [request for request, _ in ends], [output for _, output in ends]
        for index, request in enumerate(requests):
            if type(request.payload) is not bytes:
                outputs[index] = self._read(request, outputs[index])
        batch = message.batch
        finish_each(requests, outputs, PLAIN if batch is None else dispatch_of(batch), undelivered)
        PLAIN.refused = ()  # the dispatcher has counted these requests

    def ended(self, message: FailedRequest | MustHandOver) -> None:
        """Give one request its end, which is not an output."""
        request = self.open.pop(message.number, None)
        if request is None:
            return
        if isinstance(message, MustHandOver):
            self._end(request, request.pass_on)
            _drop(request.payload)
        else:
            _drop(request.payload)
            error = received_error(message.error)
            error.reported = True
            self._end(request, request.fail, error)

    def placed(self, message: PlacedOutput) -> None:
        """Give one request its response, which lies where the worker has written it."""
        block = self._outputs.block(message)
        if block is None:
            self.link.put(WantCopy(message.memory, message.offset))
            return
        request = self.open.pop(message.number, None)
        if request is None:
            block.release()
            return
        output = block if type(request.payload) is bytes else self._read(request, block)
        self._end(request, request.finish, output, dispatch_of(message.batch))

    def _read(self, request: Any, output: bytes | list[SentArray] | OutputBlock) -> Any:
        """Return the output of a request whose payload was not sent as it is. No worker reads its place any more."""
        payload = request.payload
        discard(payload)
        try:
            if isinstance(payload, dict):
                return self._unpack(output if type(output) is bytes else _leased(output))
            return _vectors_in(output, payload) if isinstance(payload, Tokens) else output
        except Exception:
            settle(request)
            undelivered(request)
            return None

    def _end(self, request: Any, end: Callable[..., None], *result: Any) -> None:
        if settle(request):
            try:
                end(*result)
            except Exception:
                undelivered(request)


def _sendable(request: Any, places: LentPlaces | None) -> tuple[SentPayload, bool] | None:
    """Return the payload of a request as it is sent, and whether that is packed arrays; None for one that cannot be sent."""
    payload = request.payload
    if isinstance(payload, LentPlace):
        return _sent(payload), False
    if isinstance(payload, ArenaArrays) and isinstance(payload.block, LentPlace):
        block = payload.block
        if (head := head_of_views(payload, block.address, len(block.view))) is not None:
            block.view[: len(head)] = head
            return _sent(block), True
        packed = pack(payload)  # BYTES are not views of their memory
        if len(packed) > len(block.view):
            return None
        request.keep_body()
        block.view[: len(packed)] = packed
        return SentPlace(block.offset, len(packed)), True
    if not isinstance(payload, dict):
        return None
    packed = pack(payload)
    if len(packed) <= LONGEST_PAYLOAD:
        return packed, True
    place = None if places is None else places.reserve(len(packed))
    if place is None:
        if places is not None:
            places.ask(len(packed), _for_the_next)
        return None
    place.view[:] = packed
    request.payload = ArenaArrays(payload, place)
    return _sent(place), True


def _vectors_in(output: Any, tokens: Tokens) -> Any:
    """Return the output of a text: JSON, a vector, or the arrays of its outputs."""
    import numpy  # which fronts without texts do not load

    if isinstance(output, bytes):
        return output
    arrays = [numpy.frombuffer(each.data, numpy.float32).reshape(each.shape) for each in output]
    return arrays if tokens.outputs else arrays[0]


def _leased(block: Any) -> Any:
    from weir.workers.run.tensors import lease  # needs numpy, which fronts load with the first arrays

    return lease(block)


def _sent(place: LentPlace) -> SentPlace:
    return SentPlace(place.offset, len(place.view))


def _for_the_next(has_place: bool) -> None:
    """Do nothing: the request that needed a place is handed over, and the next one finds it."""


def _drop(payload: Any) -> None:
    """Release the place of a payload, if it is in one. A worker may still read it, so no other body comes there."""
    block = payload.block if isinstance(payload, ArenaArrays) else payload
    if isinstance(block, LentPlace):
        block.spoilt = True
        block.release()


class NoControl:
    """The workers of a model, of which a front knows nothing."""

    ready_workers = 0

    def best_rate(self, now: float) -> float:
        """Return infinity: the rate is not known here."""
        return float("inf")


class RemoteHandle:
    """A model of the dispatcher: a ModelHandle. `virtual_time` is that of the front's encoder, if it is a text model, in tokens."""

    tracing: Tracer | None = None  # the dispatcher handles what is traced
    control: Any = NoControl()  # the dispatcher alone controls models
    virtual_time: Callable[[], float] = float

    def __init__(
        self, state: ModelDescription, requests: Requests, places: LentPlaces, clock: Callable[[], float]
    ) -> None:
        self.now = clock  # that of all services of a server, and one for all processes
        self.places = places
        self._transferred: dict[str, tuple[int, int]] = {}  # bytes received and sent, by frontend
        self.arena_bytes = state.arena_bytes
        self.takes_texts = state.takes_texts
        self.facts = facts_of(state)
        self.number = state.number
        # Without an entry in a queue, its connection is handed over.
        self.inference = None if state.hot else Inference()
        self._requests = requests

    @property
    def not_ready_reason(self) -> str:
        """Not known here: the dispatcher refuses the requests that it must refuse."""
        return ""

    def submit(self, request: Request, now: float | None = None) -> None:
        """See ModelHandle. A refusal comes later, as the error that ends the request."""
        payload = request.payload
        if type(payload) is bytes:
            self._requests.send(request, self.number, request.form, request.arrival, payload, len(payload))
        else:
            self._requests.submit_other(self, request)

    def cancel(self, request: Request) -> None:
        """See ModelHandle."""
        self._requests.cancel(request)

    def has_room(self, rows: int, *, bulk: bool = False) -> bool:
        """Not known here; see `not_ready_reason`."""
        return True

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a place that the front has; None if `places` must ask for one."""
        return self.places.reserve(size_bytes)

    def notify(self, frontend: str, error: WeirError) -> None:
        """See ModelHandle."""
        if not error.reported:
            error.reported = True
            # Before the response: whoever has that finds the refusal counted.
            self._requests.link.send(Refused(self.number, frontend, sent_error(error, LONGEST_TEXT)))

    def transferred(self, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        """See ModelHandle."""
        received, sent = self._transferred.get(frontend, (0, 0))
        self._transferred[frontend] = received + received_bytes, sent + sent_bytes

    def report(self) -> None:
        """Send the dispatcher the bytes that were transferred since the last call."""
        for frontend, (received, sent) in self._transferred.items():
            self._requests.link.put(Transferred(self.number, frontend, received, sent))
        self._transferred.clear()


def facts_of(state: ModelDescription) -> ModelFacts:
    """Return the facts of a model, with a stand-in for its class."""
    declared: dict[str, Any] = {
        "inputs": tuple(state.inputs),
        "outputs": tuple(state.outputs),
        "content_types": tuple(state.content_types),
        "streaming": state.streaming,
        "Output": bytes if state.writes_bytes else None,
    }
    if state.encodes:
        declared["encode"] = lambda self, value, content_type: b""  # it is only asked whether there is one
    batching = BatchingSettings(
        max_batch_size=state.max_batch_size,
        max_queue_size=state.max_queue_size,
        max_batch_cost=state.max_batch_cost,
    )
    stand_in = type("StandIn", (Model,), declared)
    settings = ServiceSettings(timeout=state.timeout)
    return ModelFacts(state.name, state.version, stand_in, state.platform, batching, settings)


class RemoteModels:
    """The models of the dispatcher: the Models of a front. A model that is not here may be there: see `get`."""

    def __init__(self, requests: Requests, fronts: int, memory: MemoryReceiver, clock: Callable[[], float]) -> None:
        self.changed: list[Callable[[], None]] = []
        self.aliases: Mapping[str, str] = MappingProxyType({})
        self.on_demand: Mapping[str, str] = {}
        self.services: Mapping[str, RemoteHandle] = {}
        self.routes: Mapping[str, RemoteHandle] = {}
        self._versions: dict[str, dict[str, RemoteHandle]] = {}
        self._by_number: dict[int, RemoteHandle] = {}
        self._requests = requests
        self._fronts = fronts
        self._memory = memory
        self._clock = clock
        self.known = asyncio.Event()  # set when the first table has come

    def replace(self, table: ModelTable) -> None:
        """Know the models of `table` from now on."""
        known = self._by_number
        self._by_number = {state.number: known.get(state.number) or self._handle(state) for state in table.models}
        for number in known.keys() - self._by_number.keys():
            known[number].report()
            known[number].places.close()
        self._versions = {}
        for handle in self._by_number.values():
            self._versions.setdefault(handle.facts.name, {})[handle.facts.version] = handle
        self.services = {name: self._by_number[number] for name, number in table.defaults.items()}
        self.routes = {path: self._by_number[number] for path, number in table.routes.items()}
        self.aliases = table.aliases
        for changed in self.changed:
            changed()
        self.known.set()

    def _handle(self, state: ModelDescription) -> RemoteHandle:
        places = LentPlaces(state.number, self._fronts, self._requests.link.put, self._memory)
        return RemoteHandle(state, self._requests, places, self._clock)

    def numbered(self, model: int) -> RemoteHandle | None:
        """Return the model with this number; None if it is not there any more."""
        return self._by_number.get(model)

    def sweep(self) -> None:
        """Note that a second has passed."""
        for handle in self._by_number.values():
            handle.places.sweep()
            handle.report()

    def report(self) -> None:
        """Send the dispatcher what was counted."""
        for handle in self._by_number.values():
            handle.report()

    @property
    def sole(self) -> RemoteHandle | None:
        """See Models."""
        return next(iter(self.services.values())) if len(self.services) == 1 else None

    @property
    def all(self) -> list[RemoteHandle]:
        """See Models."""
        return list(self._by_number.values())

    @property
    def ready(self) -> bool:
        """Not known here; see RemoteHandle.not_ready_reason."""
        return True

    @property
    def not_ready_reasons(self) -> dict[str, str]:
        """Not known here; see RemoteHandle.not_ready_reason."""
        return {}

    def get(self, name: str, version: str = "") -> RemoteHandle:
        """See Models. Raises ModelNotFound also for a model that the dispatcher is about to announce."""
        for each in (name, self.aliases.get(name, name)):
            found = self._versions.get(each, {}).get(version) if version else self.services.get(each)
            if found is not None:
                return found
        raise unknown_model(name, self.services, version)

    def versions(self, name: str) -> Mapping[str, RemoteHandle]:
        """See Models."""
        return self._versions[self.get(name).facts.name]

    def knows(self, name: str) -> bool:
        """See Models."""
        return name in self.services or self.aliases.get(name) in self.services

    def reserve(self, segments: Iterable[str]) -> None:
        """Do nothing: the dispatcher reserves paths."""
