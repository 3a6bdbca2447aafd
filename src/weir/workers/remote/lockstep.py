"""Entries of a batch as bytes for a worker of any language, and its answers as what each caller wants."""

import contextlib
from typing import Any

from weir.errors import (
    InvalidRequest,
    ModelError,
    TooLarge,
    Unsupported,
    UnsupportedMediaType,
    ValidationFailed,
    WeirError,
)
from weir.messages import JSON, LENT, MSGPACK, OBJECT, OCTETS, Batch, EventKind, Events, Timing
from weir.wire.lockstep import LockstepReply, encode_jobs, make_ids
from weir.wire.values import DECODE, ENCODE, UNREADABLE, UNWRITABLE

# What a worker may say that an item is, in an error's document {"error": {"type": ..., "message": ..., "details": ...}}.
_SAID = {
    kind.__name__: kind
    for kind in (InvalidRequest, ModelError, TooLarge, Unsupported, UnsupportedMediaType, ValidationFailed)
}


class LockstepBatch:
    """One batch while an external worker has it."""

    def __init__(self, batch: Batch, salt: int) -> None:
        self.batch_id = batch.batch_id
        count = len(batch.payloads)
        self._types = _each(batch.content_types, count)
        self._accepts = _each(batch.accepts, count)
        self._unsent: dict[int, WeirError] = {}
        bodies = [self._body(index, payload) for index, payload in enumerate(batch.payloads)]
        self._sent = [index for index in range(count) if index not in self._unsent]
        every = make_ids(salt, batch.batch_id, count)
        self.ids = [every[index] for index in self._sent]
        self.frame = encode_jobs(self.ids, [bodies[index] for index in self._sent])

    def events(self, reply: LockstepReply, seconds: float) -> Events:
        """Return the batch's final events; the batch was `seconds` with the worker."""
        outputs: list[Any] = [None] * len(self._types)
        for place, index in enumerate(self._sent):
            outputs[index] = self._output(index, reply.bodies[place], place in reply.failed)
        for index, error in self._unsent.items():
            outputs[index] = error
        kinds = [EventKind.ERROR if isinstance(output, WeirError) else EventKind.DONE for output in outputs]
        return Events(
            self.batch_id, outputs, kinds=kinds if EventKind.ERROR in kinds else None, timing=Timing(0.0, seconds, 0.0)
        )

    def _body(self, index: int, payload: Any) -> bytes:
        if isinstance(payload, (bytes, bytearray, memoryview)):
            if self._types[index] == OBJECT:
                self._types[index] = OCTETS
            return bytes(payload)
        view = getattr(payload, "view", None)  # a Block
        if view is not None:
            return bytes(view)
        self._types[index] = JSON
        try:
            return ENCODE[JSON](payload)
        except UNWRITABLE as error:
            self._unsent[index] = InvalidRequest(
                f"a {type(payload).__name__} cannot be sent to a worker as JSON: {error}"
            )
            return b""

    def _output(self, index: int, body: bytes | None, failed: bool) -> Any:
        if body is None:
            return ModelError("the worker's answer leaves this item out")
        if failed:
            return _refusal(body, self._types[index])
        sent, wanted = self._types[index], self._accepts[index]
        if wanted in (sent, OCTETS) or sent not in DECODE:
            return body
        if wanted not in (OBJECT, LENT, *ENCODE):
            return UnsupportedMediaType(f"accept {wanted!r}: the worker's answer is {sent}")
        try:
            value = DECODE[sent](body)
            return value if wanted in (OBJECT, LENT) else ENCODE[wanted](value)
        except (*UNREADABLE, *UNWRITABLE) as error:
            return ModelError(f"the worker's answer must be {sent} that can be read as {wanted} ({error})")


def _refusal(body: bytes, content_type: str) -> WeirError:
    """Return the error that a worker's body for a failed item says."""
    said: Any = body.decode("utf-8", "replace")
    for form in (content_type, JSON) if content_type in DECODE else (JSON, MSGPACK):
        with contextlib.suppress(*UNREADABLE, *UNWRITABLE):
            said = DECODE[form](body)
            break
    error = said.get("error") if isinstance(said, dict) and len(said) == 1 else None
    if isinstance(error, dict):
        kind, message = _SAID.get(str(error.get("type"))), error.get("message")
        if kind is not None and isinstance(message, str):
            return kind(message, details=error.get("details"))
    return ValidationFailed("the worker refused this item", details=said)


def _each(column: str | list[str], count: int) -> list[str]:
    return [column] * count if isinstance(column, str) else list(column)
