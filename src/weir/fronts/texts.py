"""The dispatcher's side of texts that fronts have tokenized (TextHandle in remote.py): the model's own encoder gives each its turn among the texts of other callers."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import numpy

from weir.errors import ModelError, Overloaded, WeirError
from weir.fronts.dispatcher import KnownForm, LocalHandle, RemoteRequest
from weir.fronts.messages import FULL_FRAME, SentArray, SentText, Submit, TextOutputs, batched
from weir.messages import OBJECT, Dispatch
from weir.serving.delivery import discard, is_block
from weir.text_models.texts import Tokens

if TYPE_CHECKING:
    from weir.frontends.frontend import Turns
    from weir.fronts.dispatcher import ConnectedFront


class TextQueue:
    """The queue of a text model, as the texts of a front leave it."""

    def __init__(self, handle: LocalHandle, turns: "Turns") -> None:
        self._handle = handle
        self.turns = turns

    def cancel(self, request: "RemoteText") -> None:
        """Withdraw a text, whose caller has left."""
        self.turns.leave(request.turn)
        self._handle.cancel(request)


class RemoteText(RemoteRequest):
    """A text that a front has tokenized."""

    __slots__ = ("brief", "tag", "texts", "turn", "turns")

    def __init__(
        self, texts: "TextsOfFront", queue: TextQueue, form: KnownForm, number: int, arrival: float, sent: SentText
    ) -> None:
        # Tokens that are only ids are bytes for the worker.
        payload: Any = Tokens(sent.ids, sent.second, sent.outputs) if sent.second or sent.outputs else sent.ids
        super().__init__(texts.front, queue, form, number, arrival, payload)
        self.cost = cost = float(sent.cost)
        self.brief = sent.brief
        self.texts = texts
        self.turns = queue.turns
        self.turn = queue.turns.enter(sent.ahead, cost)
        self.tag = self.turn[0]

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Send the output to the front."""
        if type(output) is not bytes or self.accept == OBJECT:
            output = sent_output(output, as_bytes=self.accept == OBJECT)
        texts, opened = self.texts, self.front.open
        if opened.pop(self.number, None) is None:
            return
        self.turns.leave(self.turn)
        answers = texts.answers if texts.dispatch is dispatch else texts.begin(dispatch)
        if answers is None:
            self.front.fail(self.number, Overloaded("the front of this connection does not read the responses"))
            return
        answers.numbers.append(self.number)
        answers.outputs.append(output)
        texts.size_bytes += len(output) if isinstance(output, bytes) else sum(len(each.data) for each in output)
        if not opened or texts.size_bytes > FULL_FRAME:  # no other output can come in this turn, or the frame is full
            texts.turn_ends()

    def fail(self, error: WeirError) -> None:
        """Send the error to the front."""
        if self.front.open.pop(self.number, None) is not None:
            self.turns.leave(self.turn)
            self.front.fail(self.number, error)

    def abandon(self) -> None:
        """Send an error: the output could not be sent."""
        self.fail(ModelError("the vectors could not be put together"))


def sent_output(output: Any, *, as_bytes: bool) -> bytes | list[SentArray]:
    """Return the output for a text as it is sent: JSON as it is, with `as_bytes` a vector as its numbers, all else as arrays."""
    if type(output) is bytes:
        return output
    if is_block(output):
        try:
            return bytes(output.view)
        finally:
            discard(output)
    if as_bytes and type(output) is numpy.ndarray and output.ndim == 1:
        return output.astype(numpy.float32, copy=False).tobytes()
    parts = output if isinstance(output, (list, tuple)) else [output]
    arrays = [numpy.asarray(each, numpy.float32) for each in parts]
    return [SentArray(each.shape, each.tobytes()) for each in arrays]


class TextsOfFront:
    """The texts of `front`, and their outputs: those of one batch go in one message."""

    def __init__(self, front: "ConnectedFront") -> None:
        self.front = front
        self.answers: TextOutputs | None = None  # of the batch `dispatch`, in this turn of the loop
        self.dispatch: Dispatch | None = None
        self.size_bytes = 0
        self._loop = asyncio.get_running_loop()

    def enter(self, form: KnownForm, turns: "Turns", numbers: range, message: Submit, now: float) -> None:
        """Put the texts of `message` into the queue of the model of `form`."""
        handle = cast(LocalHandle, form.handle)
        queue, opened = TextQueue(handle, turns), self.front.open
        for number, arrival, sent in zip(numbers, message.arrivals, message.payloads, strict=True):
            request = opened[number] = RemoteText(self, queue, form, number, arrival, cast(SentText, sent))
            try:
                handle.submit(request, now)
            except WeirError as error:
                handle.notify(form.frontend, error)
                request.fail(error)

    def begin(self, dispatch: Dispatch) -> TextOutputs | None:
        """Return where the outputs of a batch go; None if the front must not get more before it has read."""
        if self.answers is None:
            self._loop.call_soon(self.turn_ends)
        else:
            self.front.put(self.answers)
        self.answers, self.dispatch, self.size_bytes = None, None, 0
        if not self.front.is_full:
            self.answers, self.dispatch = TextOutputs(batched(dispatch), [], []), dispatch
        return self.answers

    def turn_ends(self) -> None:
        """Send the outputs of this turn."""
        answers, self.answers, self.dispatch, self.size_bytes = self.answers, None, None, 0
        if answers is not None:
            self.front.send(answers)
            self.front.charge_unread()
