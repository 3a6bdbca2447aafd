"""Reads payloads into items and writes answers as outputs: by content type, validated, and encoded as each caller wants it."""

from collections.abc import Callable
from typing import Any

from weir.errors import (
    InvalidRequest,
    ModelError,
    UnsupportedMediaType,
    ValidationFailed,
    WeirError,
    kind_of,
)
from weir.messages import JSON, KSERVE, LENT, MSGPACK, OBJECT, OCTETS
from weir.model import Model, is_tensor_model, overrides
from weir.wire.schema import Schema, refusal, schema_of
from weir.wire.values import DECODE, ENCODE, UNREADABLE, UNWRITABLE, unreadable
from weir.workers.run.steps import Fatal, Fault, ValuesOrErrors, each, fault_of, model_error, takes

Read = Callable[[Any], Any]


class Reader:
    """Reads payloads: JSON, msgpack, bytes, Python values, and content types that the model reads itself (`decode`)."""

    def __init__(self, model: Model, fatal: Fatal) -> None:
        self._model = model
        self._fatal = fatal
        self._own = tuple(model.content_types) if overrides(type(model), "decode") else ()
        self._takes_type = takes(model.decode, "content_type", 1)
        self._has_heads = is_tensor_model(type(model))
        declared = type(model).Input
        self._schema = None if declared is None else schema_of(declared, f"{type(model).__name__}.Input")
        self._steps = {content_type: (read, self._fault(content_type)) for content_type, read in self._reads().items()}

    def read(self, payloads: list[Any], content_types: str | list[str]) -> ValuesOrErrors:
        """Return the items, with an error in the place of a payload that is malformed, refused by the schema, or of an unknown content type."""
        if not isinstance(content_types, str):
            pairs = zip(payloads, content_types, strict=True)
            return [self.read([payload], content_type)[0] for payload, content_type in pairs]
        step = self._steps.get(content_types) or self._own_step(content_types)
        if step is None:
            known = ", ".join(sorted(self._steps.keys() - {OBJECT}))
            text = f"content type {content_types!r}: not one that the model reads ({known})"
            return [payload if isinstance(payload, WeirError) else UnsupportedMediaType(text) for payload in payloads]
        read, fault = step
        return payloads if read is None else each(read, payloads, fault, fatal=self._fatal)

    def _own_step(self, content_type: str) -> tuple[Read | None, Fault] | None:
        """Return how a content type with parameters is read that the model reads itself, such as multipart with its boundary; None if it does not."""
        if content_type.partition(";")[0] not in self._own:
            return None
        finish, _ = self._steps[OBJECT]
        return self._decoded_by_model(content_type, finish), self._fault(content_type)

    def heads(self, items: ValuesOrErrors, content_types: str | list[str]) -> ValuesOrErrors | None:
        """Return what the Writer must know of each item besides its answer; None if that is nothing."""
        if not self._has_heads or KSERVE not in ((content_types,) if isinstance(content_types, str) else content_types):
            return None
        from weir.workers.run import tensors

        return tensors.heads_of(items)

    def _reads(self) -> dict[str, Read | None]:
        """Return how each content type is read; None where there is nothing to do."""
        reads: dict[str, Read | None]
        if is_tensor_model(type(self._model)):
            from weir.workers.run import tensors

            reads = {**tensors.readers(self._model)}
        elif self._schema is None:
            reads = {OBJECT: None, OCTETS: bytes, JSON: DECODE[JSON], MSGPACK: DECODE[MSGPACK]}
        else:
            reads = self._validated(self._schema)
        finish = reads[OBJECT]
        return reads | {content_type: self._decoded_by_model(content_type, finish) for content_type in self._own}

    def _validated(self, schema: Schema) -> dict[str, Read | None]:
        def from_bytes(payload: Any) -> Any:
            return schema.check(bytes(payload))

        return {OBJECT: schema.item, OCTETS: from_bytes, JSON: schema.reader(JSON), MSGPACK: schema.reader(MSGPACK)}

    def _decoded_by_model(self, content_type: str, finish: Read | None) -> Read:
        def read(payload: Any) -> Any:
            item = self._decoded(bytes(payload), content_type)
            return item if finish is None else finish(item)

        return read

    def _decoded(self, body: bytes, content_type: str) -> Any:
        """Return what `decode` makes of `body`. What it raises is an InvalidRequest, because the body comes from a caller."""
        try:
            return self._model.decode(body, *((content_type,) if self._takes_type else ()))
        except WeirError:
            raise
        except Exception as error:
            raise InvalidRequest(f"body: must be {content_type} ({type(error).__name__}: {error})") from error

    def _fault(self, content_type: str) -> Fault:
        def fault(error: BaseException, payload: Any) -> WeirError:
            if isinstance(error, WeirError):
                return self._hinted(error, payload)
            if content_type in DECODE and content_type not in self._own:
                if self._schema is None and isinstance(error, UNREADABLE):
                    return self._hinted(unreadable(error, content_type, payload), payload)
                refused = refusal(error, content_type, payload)
                if refused is not None:
                    return self._hinted(refused, payload)
            return model_error("Input", error)

        return fault

    def _hinted(self, error: WeirError, payload: Any) -> WeirError:
        """Return `error` with the way out of two common mistakes: a body without its content type, and a list of items."""
        start = bytes(payload[:1]) if isinstance(payload, (bytes, memoryview)) else b""
        if type(error) is InvalidRequest and self._own and not start.isascii():
            types = " or ".join(self._own)
            return InvalidRequest(f"{error.message}; the model reads {types}: curl -H 'Content-Type: {self._own[0]}'")
        if type(error) is ValidationFailed and start == b"[":
            hint = "to send several items, POST the list to /infer/NAME/batch"
            return ValidationFailed(f"{error.message}; {hint}", details=error.details)
        return error


Write = Callable[..., bytes]


class AnswerWriter:
    """Writes the answers of the models `kind`, by the declared types: JSON, msgpack, bytes and Python values.

    It is the one writer of answers: workers use it, and the server for answers that a hook has changed. `label` is the name of the service,
    and after a slash its version, if it has one.
    """

    def __init__(self, kind: type[Model], fatal: Fatal, label: str = "") -> None:
        self._fatal = fatal
        declared = kind.Output
        self._schema = None if declared is None else schema_of(declared, f"{kind.__name__}.Output")
        writes = self._writes_of(kind, label)
        self._steps = {accept: (write, self._fault(accept)) for accept, write in writes.items()}

    def write(
        self, answers: ValuesOrErrors, accepts: str | list[str], heads: ValuesOrErrors | None = None
    ) -> ValuesOrErrors:
        """Return the outputs, with a ModelError in the place of an answer that `Output` refuses or that cannot be written, and an
        UnsupportedMediaType for a type that the model does not write. `heads` is what Reader.heads returned."""
        if self._schema is not None:
            answers = each(self._schema.check, answers, _wrong_output, fatal=self._fatal)
        if isinstance(accepts, str):
            return self._written(answers, accepts, heads)
        heads = heads or [None] * len(answers)
        triples = zip(answers, accepts, heads, strict=True)
        return [self._written([answer], accept, [head])[0] for answer, accept, head in triples]

    def _written(self, answers: ValuesOrErrors, accept: str, heads: ValuesOrErrors | None) -> ValuesOrErrors:
        if accept in (OBJECT, LENT):
            return answers
        step = self._steps.get(accept)
        if step is None:
            known = ", ".join(sorted(self._steps))
            text = f"accept {accept!r}: not one that the model writes ({known})"
            return [answer if isinstance(answer, WeirError) else UnsupportedMediaType(text) for answer in answers]
        write, fault = step
        more = () if heads is None or accept != KSERVE else (heads,)
        return each(write, answers, fault, *more, fatal=self._fatal)

    def _writes_of(self, kind: type[Model], label: str) -> dict[str, Write]:
        """Return how an answer is written in each content type."""
        if is_tensor_model(kind):
            from weir.workers.run import tensors

            return {**tensors.writers(kind, label)}
        if self._schema is not None:
            return {JSON: self._schema.writer(JSON), MSGPACK: self._schema.writer(MSGPACK), OCTETS: _octets}
        return {JSON: ENCODE[JSON], MSGPACK: ENCODE[MSGPACK], OCTETS: _octets}

    def _fault(self, accept: str) -> Fault:
        def fault(error: BaseException, answer: Any) -> WeirError:
            if isinstance(error, WeirError):
                return error
            if not isinstance(error, UNWRITABLE):
                return model_error("encode", error)
            return model_error(f"writing the result ({kind_of(answer)}) as {accept}", error)

        return fault


class Writer(AnswerWriter):
    """Writes the answers of one model instance, also in the content types that it writes itself (`encode`)."""

    def __init__(self, model: Model, fatal: Fatal, label: str = "") -> None:
        super().__init__(type(model), fatal, label)
        self._model = model
        self._takes_type = takes(model.encode, "content_type", 1)
        if overrides(type(model), "encode"):
            own = {content_type: self._encoded_by_model(content_type) for content_type in model.content_types}
            self._steps |= {content_type: (write, fault_of("encode")) for content_type, write in own.items()}

    def _encoded_by_model(self, content_type: str) -> Write:
        def write(answer: Any) -> bytes:
            more = (content_type,) if self._takes_type else ()
            body = self._model.encode(answer, *more)
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise ModelError(f"encode returned {type(body).__name__} for {content_type}, must be bytes")
            return bytes(body)

        return write


def _octets(answer: Any) -> bytes:
    if isinstance(answer, (bytes, bytearray, memoryview)):
        return bytes(answer)
    raise UnsupportedMediaType(f"accept {OCTETS!r}: the result is {kind_of(answer)}, only bytes are written so")


def _wrong_output(error: BaseException, _answer: Any) -> WeirError:
    if isinstance(error, ValidationFailed):
        return ModelError(f"the model's answer is no valid Output: {error.message}", details=error.details)
    return model_error("Output", error)
