"""Texts in a front: it has encoders of its own, whose models are `TextHandle`s, and the dispatcher queues the tokens (texts.py)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy

from weir.batching.request_state import settle
from weir.fronts.messages import LONGEST_TOKENS, SentArray, SentText, TextOutputs, dispatch_of
from weir.fronts.remote import HandedOver, RemoteHandle, Requests
from weir.messages import OBJECT
from weir.serving.delivery import undelivered

if TYPE_CHECKING:
    from weir.fronts.messages import ModelDescription
    from weir.fronts.places import LentPlaces


class NoControl:
    """What a front knows of the workers of a model: nothing."""

    ready_workers = 0

    def best_rate(self, now: float) -> float:
        """Return infinity: the rate is not known here."""
        return float("inf")


class TextHandle(RemoteHandle):
    """A text model of the dispatcher. `virtual_time` is that of the front's encoder, in tokens."""

    control: Any = NoControl()

    def __init__(
        self, state: "ModelDescription", requests: Requests, places: "LentPlaces", clock: "Callable[[], float]"
    ) -> None:
        super().__init__(state, requests, places, clock)
        self.virtual_time: Callable[[], float] = float

    def submit(self, request: Any, now: float | None = None) -> None:
        """See ModelHandle. `limit` of the request has its timeout, and the instant from which that counts."""
        requests, tokens = self._requests, request.payload
        timeout, began = request.limit
        ids, second, outputs = tokens
        if len(ids) > LONGEST_TOKENS:
            raise HandedOver
        form = (self.number, timeout, request.priority, 1, OBJECT, request.accept, None, False, request.frontend)
        ahead = max(0.0, request.tag - self.virtual_time())
        sent = SentText(ids, int(request.cost), ahead, request.brief, second, outputs)
        requests.send(request, form, began, sent, len(ids))


def take_outputs(open_requests: dict[int, Any], message: TextOutputs) -> None:
    """Give texts their outputs."""
    dispatch = dispatch_of(message.batch)
    for number, sent in zip(message.numbers, message.outputs, strict=True):
        request = open_requests.pop(number, None)
        if request is None or not settle(request):  # its caller has left
            continue
        try:
            request.finish(_output(sent, request), dispatch)
        except Exception:
            undelivered(request)


def _output(sent: bytes | list[SentArray], request: Any) -> Any:
    if isinstance(sent, bytes):
        return sent if request.accept != OBJECT else numpy.frombuffer(sent, numpy.float32)
    arrays = [numpy.frombuffer(each.data, numpy.float32).reshape(each.shape) for each in sent]
    return arrays if request.payload.outputs else arrays[0]
