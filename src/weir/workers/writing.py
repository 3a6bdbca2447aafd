"""Answers to outputs: validation, and encoding as each caller wants it."""

from collections.abc import Callable
from typing import Any

from weir.errors import ModelError, UnsupportedMediaType, ValidationFailed, WeirError
from weir.messages import JSON, KSERVE, LENT, MSGPACK, OBJECT, OCTETS
from weir.model import Model, is_tensor_model, overrides
from weir.wire.schema import schema_of
from weir.wire.values import ENCODE, UNWRITABLE
from weir.workers.arity import takes_second
from weir.workers.faults import Fault, model_error
from weir.workers.steps import Fatal, ValuesOrErrors, each

Write = Callable[..., bytes]


class Writer:
    """Writes what a model's doors give: JSON, msgpack, bytes, Python values, and content types of the model's own."""

    def __init__(self, model: Model, fatal: Fatal, label: str = "") -> None:
        self._model = model
        self._label = label  # what the model is served as: its name, and after a slash its version
        self._fatal = fatal
        self._own = tuple(model.content_types) if overrides(type(model), "encode") else ()
        self._takes_type = takes_second(model.encode, "content_type")
        declared = type(model).Output
        self._schema = None if declared is None else schema_of(declared, f"{type(model).__name__}.Output")
        self._steps = {accept: (write, self._fault(accept)) for accept, write in self._writes().items()}

    def write(
        self, answers: ValuesOrErrors, accepts: str | list[str], heads: ValuesOrErrors | None = None
    ) -> ValuesOrErrors:
        """Return the outputs. An answer that `Output` refuses, or that cannot be written, is a ModelError in its place; a
        form that the model does not write is an UnsupportedMediaType. `heads` is what Reader.heads said."""
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

    def _writes(self) -> dict[str, Write]:
        own = {content_type: self._encoded_by_model(content_type) for content_type in self._own}
        if is_tensor_model(type(self._model)):
            from weir.workers import tensorwork

            return tensorwork.writers(self._model, self._label) | own
        return {JSON: ENCODE[JSON], MSGPACK: ENCODE[MSGPACK], OCTETS: _octets, **own}

    def _encoded_by_model(self, content_type: str) -> Write:
        def write(answer: Any) -> bytes:
            more = (content_type,) if self._takes_type else ()
            body = self._model.encode(answer, *more)
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise ModelError(f"encode returned {type(body).__name__} for {content_type}, must be bytes")
            return bytes(body)

        return write

    def _fault(self, accept: str) -> Fault:
        own = accept in self._own

        def fault(error: BaseException, answer: Any) -> WeirError:
            if isinstance(error, WeirError):
                return error
            if own or not isinstance(error, UNWRITABLE):
                return model_error("encode", error)
            return model_error(f"writing the answer (a {type(answer).__name__}) as {accept}", error)

        return fault


def _octets(answer: Any) -> bytes:
    if isinstance(answer, (bytes, bytearray, memoryview)):
        return bytes(answer)
    raise UnsupportedMediaType(f"accept {OCTETS!r}: the answer is a {type(answer).__name__}, only bytes are written so")


def _wrong_output(error: BaseException, _answer: Any) -> WeirError:
    if isinstance(error, ValidationFailed):
        return ModelError(f"the model's answer is no valid Output: {error.message}", details=error.details)
    return model_error("Output", error)
