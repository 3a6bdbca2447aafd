"""The steps of a model (decode, preprocess, predict, postprocess, encode) for a whole batch, such that an entry that fails fails alone.

A *column* is a list with one value per entry, or a WeirError in the place of an entry that has failed. Steps leave errors as they are. A step
that the model does not override is skipped. What a model raises becomes the error that callers get: see `model_error`.

A Reader turns payloads into items, by content type and validated, and a Writer responses into outputs, encoded as each caller wants it.
"""

import copy
import inspect
import logging
import os
import re
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple

from weir.errors import InvalidRequest, ModelError, UnsupportedMediaType, ValidationFailed, WeirError, counted, kind_of
from weir.messages import JSON, KSERVE, LENT, MSGPACK, OBJECT, OCTETS, has_failed
from weir.model import Model, Sizes, is_tensor_model, overrides
from weir.wire.schema import Schema, refusal, schema_of
from weir.wire.values import (
    DECODE,
    DECODE_SMALL,
    ENCODE,
    SMALL_BODY,
    UNREADABLE,
    UNWRITABLE,
    first_nonfinite,
    unreadable,
)

_logger = logging.getLogger("weir")

# In a worker process these exceptions end it, which the server notices. Any other, a Rust panic or a CancelledError too, is an error of the
# item or the batch.
ENDS_THE_PROCESS: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt)

# The text of an exception may be a whole array; of it, and of the traceback, only this many characters are kept.
MAX_TEXT = 2_000
MAX_TRACEBACK = 50_000

Fault = Callable[[BaseException, Any], WeirError]


def model_error(what: str, error: BaseException, hint: str = "") -> ModelError:
    """Return the ModelError for an exception that `what` (predict, postprocess, ...) raised; the cause is `error`. `hint` ends its message."""
    failure = ModelError(
        f"{what} raised {type(error).__name__}{_text(error)}{hint}",
        original_type=_qualified_name(type(error)),
        remote_traceback=_traceback(error),
    )
    failure.__cause__ = error
    return failure


def load_error(what: str, error: BaseException) -> WeirError:
    """Return the error for what the model raised while it loaded: a WeirError stays as it is. Of a relative path it says from where it counts."""
    file = error.filename if isinstance(error, FileNotFoundError) else None
    hint = f" (the working directory is {os.getcwd()})" if isinstance(file, str) and not os.path.isabs(file) else ""
    return error if isinstance(error, WeirError) else model_error(what, error, hint)


def fault_of(what: str) -> Fault:
    """Return the function that makes an item's error of an exception that `what` raised for it: a WeirError stays as it is."""

    def fault(error: BaseException, _item: Any) -> WeirError:
        return error if isinstance(error, WeirError) else model_error(what, error)

    return fault


def copies(error: WeirError, count: int) -> list[WeirError]:
    """Return `count` copies of `error`, one for each caller: they raise them independently of each other."""
    made = [error]
    for _ in range(count - 1):
        another = copy.copy(error)
        another.__cause__ = error.__cause__
        made.append(another)
    return made[:count]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a __str__ that raises costs its text, and nothing else
        return ": (its text cannot be had)"
    return text and f": {text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + ' ...'}"


def _qualified_name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _traceback(error: BaseException) -> str:
    """Return the traceback from the model's first line on, without Weir's lines above it."""
    try:
        lines = traceback.format_exception(type(error), error, _of_the_model(error.__traceback__))
        return "".join(lines)[:MAX_TRACEBACK]
    except Exception:  # as for _text
        return ""


def _of_the_model(frames: TracebackType | None) -> TracebackType | None:
    below = frames
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith("weir."):
        below = below.tb_next
    return below or frames


ValuesOrErrors = list[Any]
Fatal = tuple[type[BaseException], ...]


class PreparedBatch(NamedTuple):
    """A batch that has been decoded, validated and preprocessed. `column` is what `predict` takes, `heads` what the Writer must know of each
    entry besides its response, `seconds` how long it took, and `share` that of its Batch."""

    batch_id: int
    accepts: str | list[str]
    column: ValuesOrErrors
    heads: ValuesOrErrors | None
    seconds: float
    share: int = 1


def each(
    function: Callable[..., Any],
    column: ValuesOrErrors,
    fault: Fault,
    *more: ValuesOrErrors,
    fatal: Fatal = ENDS_THE_PROCESS,
) -> ValuesOrErrors:
    """Return the results of `function` for each value of `column`, with the values of `more` in the same place as further arguments.

    Each value is passed exactly once. If `function` raises, the result is the error that `fault` makes of the exception and the value.
    Exceptions of the types in `fatal` are passed on.
    """
    if has_failed(column):
        function = _sparing_failed(function)
    results: ValuesOrErrors = []
    iterators = [iter(column), *map(iter, more)]
    while len(results) < len(column):
        try:
            results.extend(map(function, *iterators))  # goes on after the value that raised
            if len(results) < len(column):
                raise RuntimeError("StopIteration")  # which ends `map` silently
        except BaseException as error:
            if isinstance(error, fatal):
                raise
            results.append(fault(error, column[len(results)]))
    return results


def _sparing_failed(function: Callable[..., Any]) -> Callable[..., Any]:
    def spare(value: Any, *more: Any) -> Any:
        return value if isinstance(value, WeirError) else function(value, *more)

    return spare


class TogetherStep:
    """A step that takes all entries at once: predict, and the batch forms of the other steps.

    `call` gets a list of values. `judge` gets what `call` returned, and the values, and returns one result per value; if it raises a WeirError,
    all of them get it. If `call` itself raises and `halves` is true, it is called again for each half of the values, so that only the values
    that make it raise get the error.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[list[Any]], Any],
        judge: Callable[[Any, list[Any]], ValuesOrErrors],
        *,
        halves: bool,
        fatal: Fatal,
    ) -> None:
        self._name = name
        self._call = call
        self._judge = judge
        self._halves = halves
        self._fatal = fatal

    def run(self, column: ValuesOrErrors, restarted: Callable[[], None] | None = None) -> ValuesOrErrors:
        """Return the column of results. `restarted` is called before each call but the first."""
        if not has_failed(column):
            return self._run(column, restarted)
        results = iter(self._run([value for value in column if not isinstance(value, WeirError)], restarted))
        return [value if isinstance(value, WeirError) else next(results) for value in column]

    def _run(self, values: list[Any], restarted: Callable[[], None] | None) -> ValuesOrErrors:
        if not values:
            return []
        try:
            returned = self._call(values[:])  # a copy: a model may do what it likes with its list
            if type(returned) is not list and isinstance(
                returned, Iterator
            ):  # a generator runs the model's own code only now
                returned = listed(returned, len(values))
        except BaseException as error:
            if isinstance(error, self._fatal):
                raise
            if len(values) == 1 or not self._halves:
                return self._failed(error, values)
        else:
            try:
                return self._judge(returned, values)
            except WeirError as error:
                return copies(error, len(values))
        # Here the exception is gone, and with it the frames that hold what `call` had allocated.
        middle = len(values) // 2
        results: ValuesOrErrors = []
        for half in (values[:middle], values[middle:]):
            if restarted is not None:
                restarted()
            results += self._run(half, restarted)
        return results

    def _failed(self, error: BaseException, values: list[Any]) -> ValuesOrErrors:
        if len(values) == 1 and isinstance(error, WeirError):
            return [error]
        hint = hint_for_one(self._name) if raised_by_a_list(error, values) else ""
        return list(copies(model_error(self._name, error, hint), len(values)))


def takes(method: Callable[..., Any], name: str, index: int) -> bool:
    """Return whether the bound `method` takes an optional argument of the contract: its positional parameter at `place` (from 0) is required or
    is called `name`, or it takes any number of arguments."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(positional) <= index:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return positional[index].default is inspect.Parameter.empty or positional[index].name == name


def filling(
    sizes: Sizes, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], list[Any]]
) -> tuple[Callable[[list[Any]], Any], Callable[[Any, list[Any]], list[Any]]]:
    """Return `call` and `judge` (see TogetherStep) such that lists of items are filled up to an allowed size with copies of the last item, and
    the responses to those are dropped."""

    def filled(items: list[Any]) -> list[Any]:
        return items + items[-1:] * (sizes.filled(len(items)) - len(items))

    def called(items: list[Any]) -> Any:
        more = filled(items)
        returned = call(more)
        return listed(returned, len(more)) if isinstance(returned, Iterator) else returned

    return called, lambda returned, items: judge(returned, filled(items))[: len(items)]


class Prediction:
    """Runs the columns of a batch through one model instance, which has been loaded."""

    def __init__(self, model: Model, *, retry_in_halves: bool, fatal: Fatal, max_batch_size: int = 1) -> None:
        kind = type(model)
        self._model = model
        self._fatal = fatal
        self._preprocess = model.preprocess if overrides(kind, "preprocess") else None
        self._postprocess = model.postprocess if overrides(kind, "postprocess") else None
        self._takes_preprocessed = self._postprocess is not None and takes(self._postprocess, "preprocessed", 1)

        def together(
            name: str, call: Callable[[list[Any]], Any], judge: Callable[[Any, list[Any]], ValuesOrErrors]
        ) -> TogetherStep:
            return TogetherStep(name, call, judge, halves=retry_in_halves, fatal=fatal)

        def batch_form(name: str) -> TogetherStep | None:
            return together(name, getattr(model, name), judge_of(name)) if overrides(kind, name) else None

        self._preprocess_batch = batch_form("preprocess_batch")
        self._postprocess_batch = batch_form("postprocess_batch")
        if is_tensor_model(kind):
            from weir.workers.run.tensors import Splitter, Stacker, input_buffers, separated

            if kind.separate:
                self._predict = together("predict", *separated(model, judge_of("predict")))
            else:
                join = Stacker(kind, input_buffers(model, max_batch_size))
                self._predict = together("predict", lambda entries: model.predict(join(entries)), Splitter(kind))
        else:
            call, judge = model.predict, judge_of("predict")
            sizes = Sizes(kind)
            self._predict = together("predict", *(filling(sizes, call, judge) if sizes else (call, judge)))

    def preprocess(self, items: ValuesOrErrors) -> ValuesOrErrors:
        """Return what `predict` takes."""
        if self._preprocess_batch is not None:
            return self._preprocess_batch.run(items)
        if self._preprocess is None:
            return items
        return each(self._preprocess, items, fault_of("preprocess"), fatal=self._fatal)

    def predict(self, preprocessed: ValuesOrErrors, restarted: Callable[[], None] | None) -> ValuesOrErrors:
        """Return the model's responses. `restarted` is called each time before `predict` is called again."""
        return self._predict.run(preprocessed, restarted)

    def postprocess(self, responses: ValuesOrErrors, preprocessed: ValuesOrErrors) -> ValuesOrErrors:
        """Return what the callers get."""
        if self._postprocess_batch is not None:
            return self._postprocess_batch.run(responses)
        if self._postprocess is None:
            return responses
        more = (preprocessed,) if self._takes_preprocessed else ()
        return each(self._postprocess, responses, fault_of("postprocess"), *more, fatal=self._fatal)


def judge_of(name: str) -> Callable[[Any, list[Any]], ValuesOrErrors]:
    """Return the function that makes a column of what the model's method `name` returned. See `responses_of`."""
    return lambda returned, items: responses_of(returned, len(items), name)


def responses_of(returned: Any, count: int, name: str) -> list[Any]:
    """Return the responses in what `name` returned for `count` items: a list, a tuple, an array or tensor, or an iterator, of that length.

    Raises ModelError for anything else. Other types that have as many elements are refused too: a mapping, a table, a text or a named tuple
    is one object about the whole batch, and its parts would go to the wrong callers.
    """
    if type(returned) is list and len(returned) == count:
        return returned
    kind: Any = type(returned)
    what, of = kind_of(returned), counted(count, "item")
    if not (isinstance(returned, (list, Iterator)) or kind is tuple or _is_array(kind)):
        raise ModelError(
            f"{name} returned {what} for {of}, must be a list of {count} (or a tuple, an array or a generator){hint_for_one(name)}"
        )
    try:
        responses = listed(returned, count)
    except Exception as error:  # a generator has the model's own code in it; an array of no dimensions
        raise ModelError(f"{name} returned {what} that is not a list ({error})") from error
    if len(responses) != count:
        found = f"more than {count}" if isinstance(responses, Beginning) else len(responses)
        noun = "result" if found == 1 else "results"
        raise ModelError(f"{name} returned {found} {noun} for {of}, must be one for each{hint_for_one(name)}")
    return responses


def hint_for_one(name: str, instead: str = "return [f(item) for item in batch]") -> str:
    """Return what an error of the method `name` ends with where its author may have written it for one item."""
    if name != "predict":
        return ""
    return f"; predict gets a list of items, so you may have written it for one: {instead}"


def raised_by_a_list(error: BaseException, items: list[Any]) -> bool:
    """Return whether `error` complains of a list (or a sequence) though none of `items` is one: then it probably complains of the batch."""
    if not isinstance(error, (TypeError, AttributeError)):
        return False
    words = re.findall(r"\w+", _text(error))
    return any(
        word in words and not any(isinstance(item, kind) for item in items)
        for word, kind in (("list", list), ("sequence", Sequence))
    )


class Beginning(list[Any]):
    """The beginning of an iterator that has more elements than it should; perhaps it has no end."""


def listed(returned: Any, count: int) -> list[Any]:
    """Return what `returned` iterates over as a list; of an iterator that has more elements than `count`, its Beginning."""
    if not isinstance(returned, Iterator):
        return returned if isinstance(returned, list) else list(returned)
    responses = list(islice(returned, count + 1))
    return responses if len(responses) <= count else Beginning(responses)


@lru_cache(maxsize=256)
def _is_array(kind: Hashable) -> bool:
    """Return whether `kind` is an array of numpy or jax, or a tensor of torch or TensorFlow: what other libraries may read as one."""
    return hasattr(kind, "__dlpack__") or (kind.__module__.partition(".")[0] == "tensorflow" and hasattr(kind, "numpy"))


Read = Callable[[Any], Any]


class Reader:
    """Reads payloads: JSON, msgpack, bytes, Python values, and content types that the model reads itself (`decode`)."""

    def __init__(self, model: Model, fatal: Fatal) -> None:
        self._model = model
        self._fatal = fatal
        self._own = tuple(model.content_types) if overrides(type(model), "decode") else ()
        self._takes_type = takes(model.decode, "content_type", 1)
        self.has_heads = is_tensor_model(type(model))
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
        if read is None:
            return payloads
        if read in DECODE_SMALL and set(map(type, payloads)) == {bytes} and max(map(len, payloads)) <= SMALL_BODY:
            read = DECODE_SMALL[read]
        return each(read, payloads, fault, fatal=self._fatal)

    def _own_step(self, content_type: str) -> tuple[Read | None, Fault] | None:
        """Return how a content type with parameters is read that the model reads itself, such as multipart with its boundary; None if it does not."""
        if content_type.partition(";")[0] not in self._own:
            return None
        finish, _ = self._steps[OBJECT]
        return self._decoded_by_model(content_type, finish), self._fault(content_type)

    def heads(self, items: ValuesOrErrors, content_types: str | list[str]) -> ValuesOrErrors | None:
        """Return what the Writer must know of each item besides its response; None if that is nothing, as it always is without `has_heads`."""
        if not self.has_heads or KSERVE not in ((content_types,) if isinstance(content_types, str) else content_types):
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


class ResultWriter:
    """Writes the responses of the models `kind`, by the declared types: JSON, msgpack, bytes and Python values.

    It is the one writer of responses: workers use it, and the server for responses that a hook has changed. `label` is the name of the service,
    and after a slash its version, if it has one.
    """

    def __init__(self, kind: type[Model], fatal: Fatal, label: str = "") -> None:
        self._fatal = fatal
        declared = kind.Output
        self._schema = None if declared is None else schema_of(declared, f"{kind.__name__}.Output")
        writes = self._writes_of(kind, label)
        self._steps = {accept: (write, self._fault(accept)) for accept, write in writes.items()}
        self._label = label
        self._looks = 100  # for NaN among what was written as null, for which a model may have its own reasons

    def write(
        self, responses: ValuesOrErrors, accepts: str | list[str], heads: ValuesOrErrors | None = None
    ) -> ValuesOrErrors:
        """Return the outputs, with a ModelError in the place of a response that `Output` refuses or that cannot be written, and an
        UnsupportedMediaType for a type that the model does not write. `heads` is what Reader.heads returned."""
        if self._schema is not None:
            responses = each(self._schema.check, responses, _wrong_output, fatal=self._fatal)
        if isinstance(accepts, str):
            return self._written(responses, accepts, heads)
        heads = heads or [None] * len(responses)
        triples = zip(responses, accepts, heads, strict=True)
        return [self._written([response], accept, [head])[0] for response, accept, head in triples]

    def _written(self, responses: ValuesOrErrors, accept: str, heads: ValuesOrErrors | None) -> ValuesOrErrors:
        if accept in (OBJECT, LENT):
            return responses
        step = self._steps.get(accept)
        if step is None:
            known = ", ".join(sorted(self._steps))
            text = f"accept {accept!r}: not one that the model writes ({known})"
            return [value if isinstance(value, WeirError) else UnsupportedMediaType(text) for value in responses]
        write, fault = step
        more = () if heads is None or accept != KSERVE else (heads,)
        written = each(write, responses, fault, *more, fatal=self._fatal)
        if self._looks and written and accept in (JSON, KSERVE) and type(written[0]) is bytes and b"null" in written[0]:
            self._warn_of_nonfinite(responses[0])
        return written

    def _warn_of_nonfinite(self, response: Any) -> None:
        """Log the first NaN or infinity in `response`, the first of a batch, that has a null: JSON has neither, so they are written as that."""
        self._looks -= 1
        with suppress(*UNWRITABLE):
            if first_nonfinite(DECODE[MSGPACK](ENCODE[MSGPACK](response))) is not None:
                self._looks = 0
                _logger.warning("%r returned NaN or infinity, which JSON has only as null", self._label)

    def _writes_of(self, kind: type[Model], label: str) -> dict[str, Write]:
        """Return how a response is written in each content type."""
        if is_tensor_model(kind):
            from weir.workers.run import tensors

            return {**tensors.writers(kind, label)}
        if self._schema is not None:
            return {JSON: self._schema.writer(JSON), MSGPACK: self._schema.writer(MSGPACK), OCTETS: _octets}
        return {JSON: ENCODE[JSON], MSGPACK: ENCODE[MSGPACK], OCTETS: _octets}

    def _fault(self, accept: str) -> Fault:
        def fault(error: BaseException, response: Any) -> WeirError:
            if isinstance(error, WeirError):
                return error
            if not isinstance(error, UNWRITABLE):
                return model_error("encode", error)
            return model_error(f"writing the result ({kind_of(response)}) as {accept}", error)

        return fault


class Writer(ResultWriter):
    """Writes the responses of one model instance, also in the content types that it writes itself (`encode`)."""

    def __init__(self, model: Model, fatal: Fatal, label: str = "") -> None:
        super().__init__(type(model), fatal, label)
        self._model = model
        self._takes_type = takes(model.encode, "content_type", 1)
        if overrides(type(model), "encode"):
            own = {content_type: self._encoded_by_model(content_type) for content_type in model.content_types}
            self._steps |= {content_type: (write, fault_of("encode")) for content_type, write in own.items()}

    def _encoded_by_model(self, content_type: str) -> Write:
        def write(response: Any) -> bytes:
            more = (content_type,) if self._takes_type else ()
            body = self._model.encode(response, *more)
            if not isinstance(body, (bytes, bytearray, memoryview)):
                raise ModelError(f"encode returned {type(body).__name__} for {content_type}, must be bytes")
            return bytes(body)

        return write


def _octets(response: Any) -> bytes:
    if isinstance(response, (bytes, bytearray, memoryview)):
        return bytes(response)
    raise UnsupportedMediaType(f"accept {OCTETS!r}: the result is {kind_of(response)}, only bytes are written so")


def _wrong_output(error: BaseException, _response: Any) -> WeirError:
    if isinstance(error, ValidationFailed):
        return ModelError(f"the model's result is not a valid Output: {error.message}", details=error.details)
    return model_error("Output", error)
