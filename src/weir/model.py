"""The contract that a user implements: a class with `predict`, and whatever else it wants to say.

The class object is read in the server process (its attributes, `measure`, `examples`); instances live only in workers.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, ClassVar, NamedTuple, TypeVar

from weir.errors import SettingsError, Unsupported

# The datatypes of the Open Inference Protocol, and what numpy calls them. Of BF16, which numpy does not have, the bits.
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BYTES": "object", "BF16": "uint16",
}  # fmt: skip

# What becomes of requests whose lengths differ (Tensor.varying).
GROUP, PAD, RAGGED = "group", "pad", "ragged"

# Whether requests have the batch as first dimension (Tensor.batch).
REQUIRED, OPTIONAL, NONE = "required", "optional", "none"

# What the dimensions of an image are (Tensor.format).
FORMATS = ("", "FORMAT_NHWC", "FORMAT_NCHW")


class Tensor(NamedTuple):
    """Declares one named tensor of a tensor model: name, datatype (as in the Open Inference Protocol), and shape with
    the batch as first dimension; -1 stands for any length.

    `batch` says whether requests have that dimension, and is equal for all tensors of a model: "required"; "optional" (a
    request of the Open Inference Protocol may leave it out of all its tensors, is one row then, and is answered without it);
    or "none": the model cannot batch. Then `shape` is the whole shape ([] is a scalar), and each request runs alone, as it is.

    A request may leave an `optional` input out: `predict` does not find it in its batch then.

    `varying` says what becomes of requests in which the lengths of an input's other -1 differ: "group" (they go into
    batches of their own), "pad" (each row is filled up with `pad_value` to the longest in the batch), or "ragged" (the
    rows, of which the second dimension varies, come one after the other without that dimension). `predict` finds the
    true lengths under the name `lengths` (by default the input's name and "_lengths"): INT64, one per row, or with several
    -1 one column for each.

    An output that is `like` a padded or ragged input has that input's lengths where its own shape says -1: it comes back
    from `predict` padded or ragged too, and each request gets its own rows in their true lengths.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    varying: str = GROUP
    pad_value: Any = 0
    lengths: str = ""
    like: str = ""
    batch: str = REQUIRED
    optional: bool = False
    format: str = ""  # FORMAT_NCHW, say; shown in the model's configuration, and not looked at
    reshape: Sequence[int] | None = None  # what an ONNX file has in the place of this shape; both without the batch

    @property
    def lengths_name(self) -> str:
        """Where `predict` finds the true lengths of this input."""
        return self.lengths or f"{self.name}_lengths"

    @property
    def variable(self) -> tuple[int, ...]:
        """Which dimensions besides the first may have any length."""
        return tuple(place for place, length in enumerate(self.shape) if place and length == -1)


class Measure(NamedTuple):
    """What `Model.measure` may say of an item before it waits in the queue.

    `rows` counts against `max_batch_size`, `cost` against `max_batch_cost`; only items of equal `key` share a batch.
    """

    rows: int = 1
    cost: float = 1.0
    key: str | int | tuple[Any, ...] | None = None


class Example(NamedTuple):
    """An example item and, if the answer is known, what it must be (compared by the deep health check)."""

    item: Any
    expected: Any = ...


class Last(NamedTuple):
    """What the `predict` of a streaming model yields for an item as its last answer."""

    answer: Any


class Model:
    """Subclass this, implement `predict`, serve it.

    In a worker process the order is: the constructor with the parameters given, `load_shared`, `load`, warm-up on `examples`; then
    for each batch `decode` (only for `content_types`), validation against `Input`, `preprocess` of each item (or
    `preprocess_batch`), `predict`, `postprocess` of each item (or `postprocess_batch`), validation against `Output`,
    `encode`; at the end `unload`.

    `preprocess` may raise, and `predict` and the batch forms may return in an item's place, a RequestError such as
    InvalidRequest or ValidationFailed: that item alone gets it. Any other exception is a ModelError of the item
    (`preprocess`, `postprocess`) or of the batch (`predict`), which is then retried in halves so that only the
    offending items fail.
    """

    # Types of one item and of one answer: a pydantic model, a msgspec struct, or anything msgspec can convert to.
    Input: ClassVar[Any] = None
    Output: ClassVar[Any] = None

    # Items are texts, or may be: in the Open Inference Protocol an element is then a text as it is, and not a JSON document.
    plain_texts: ClassVar[bool] = False

    # A tensor model declares these; `predict` then gets and returns a dict of arrays.
    inputs: ClassVar[Sequence[Tensor]] = ()
    outputs: ClassVar[Sequence[Tensor]] = ()
    # A model that was compiled for certain batch sizes: each batch is filled up to the next of these, with copies of its
    # last row or item, whose answers are dropped. `max_batch_size` must be at most the largest of them.
    allowed_batch_sizes: ClassVar[Sequence[int] | None] = None
    # Why the tensors of a model have no batch (Tensor.batch); shown in its configuration.
    unbatched: ClassVar[str] = ""
    # Arrays that `predict` gets cannot be written to, and are good until it returns: large ones lie where the request was
    # received. True: they are the model's own, at the price of a copy.
    owns_inputs: ClassVar[bool] = False

    # Items, or Example values: warm-up, deep health check, OpenAPI. A tensor model's example is a dict of arrays or lists.
    examples: ClassVar[Sequence[Any]] = ()
    # Batch sizes to warm up at; None means 1, the largest, and one between.
    warmup_sizes: ClassVar[Sequence[int] | None] = None

    # Whether `predict` is a generator that gives several answers to an item: see `predict`.
    streaming: ClassVar[bool] = False

    # Content types of the model's own, read by `decode` and written by `encode`.
    content_types: ClassVar[Sequence[str]] = ()

    # Defaults for settings of the same name; flags, TOML and keyword arguments override them. None: Weir's own default.
    workers: ClassVar[int | None] = None
    max_batch_size: ClassVar[int | None] = None
    max_batch_cost: ClassVar[float | None] = None
    padded: ClassVar[bool | None] = None  # costs are lengths: a batch costs its rows times its longest
    max_padding: ClassVar[float | None] = None
    padding_cost: ClassVar[float | None] = None
    max_queue_delay: ClassVar[float | None] = None
    max_queue_size: ClassVar[int | None] = None
    policy: ClassVar[Any] = None
    pipeline_depth: ClassVar[int | None] = None
    predict_timeout: ClassVar[float | None] = None

    # Set by the worker before `load`: which worker of this model this is, from 0.
    worker_index: int = 0
    # Set by the worker too, for `output`: returns an array of this shape and dtype.
    _allocate: Callable[[tuple[int, ...], Any], Any] | None = None

    def load_shared(self) -> None:
        """Load what is the same in all workers and is only read afterwards, for example weights.

        With this method, the worker processes of a model are forked from one in which the constructor and it have been called: what it has loaded is in memory
        once. No thread may be left running when it returns, and nothing that a forked process cannot use: no session on a GPU, no
        connection. Worker threads share it too: it is called once in the first of them, and each has a shallow copy of that model. A
        worker that runs inline, and one that attaches from outside, calls it before `load`.
        """

    def load(self) -> None:
        """Load weights. Called once, in the worker, before anything else; raise to fail the start."""

    def input_buffers(self, rows: int) -> Mapping[str, Any]:
        """Return arrays of the model's own, by input, into which each batch of a tensor model is gathered: for example pinned memory,
        or the memory that a compiled model is bound to. Called once, after `load`.

        An array has room for `rows` rows, the most that a batch can have. `predict` gets the first rows of it, writable. An
        input that is padded is padded to the array's lengths; a batch that does not fit into them comes as if
        there were no array for it.
        """
        return {}

    def output(self, name: str, *shape: int) -> Any:
        """Return a new array for `predict` to fill and return as the output `name`, of this shape (rows first); its contents
        are arbitrary. A large one lies in shared memory, where there is room, and reaches the server without being
        copied. It is good for one batch; a streaming model no longer writes to it once it has yielded it. KeyError if the model declares no such output."""
        import numpy  # only tensor models need it

        dtype = numpy.dtype(DATATYPES[{tensor.name: tensor.datatype for tensor in self.outputs}[name]])
        return numpy.empty(shape, dtype) if self._allocate is None else self._allocate(shape, dtype)

    def preprocess(self, item: Any) -> Any:
        """Turn one decoded and validated item into what `predict` takes."""
        return item

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Do the same for all items at once, in order; an error in an item's place fails that item alone.

        Override this one or `preprocess`; this one wins.
        """
        raise NotImplementedError  # never called unless overridden

    def predict(self, batch: Any) -> Any:
        """Compute the answers: a list of preprocessed items in, a list of as many answers out, in order.

        A tensor model gets a dict of arrays and returns one, with the batch as first dimension; where its tensors have no
        batch (Tensor.batch), the arrays of one request.

        A streaming model's is a generator. It gets the list of preprocessed items (of a tensor model: of dicts of arrays,
        one for each request) and yields dicts: answers to give now, by index in that list. An item may be named in any
        number of them, or in none. `Last(answer)` is an item's last answer; a WeirError ends that item alone; when
        predict returns, every other item ends too. A `yield` returns a frozenset of the indices of items that have
        ended, by `Last`, by an error or because their readers have left: compute nothing more for them,
        as what is yielded for them is dropped. When no item is left, the generator is closed (GeneratorExit). What
        predict raises after its first yield is a ModelError of all items that have not ended; nothing is computed again.
        """
        raise NotImplementedError(f"{type(self).__name__}.predict is not implemented")

    def postprocess(self, item: Any, *preprocessed: Any) -> Any:
        """Turn one answer of `predict` into the answer to the caller. May take the preprocessed item as second argument."""
        return item

    def postprocess_batch(self, items: list[Any]) -> list[Any]:
        """Do the same for all answers at once. Override this one or `postprocess`; this one wins."""
        raise NotImplementedError  # never called unless overridden

    def unload(self) -> None:
        """Free what `load` took. Called when the worker is asked to end, not when it is killed.

        With a parameter, `unload(self, error=None)`, it is also called when the model ends its worker by an exception, in the
        warm-up or by SystemExit; `error` is that exception, and None when the worker was asked to end.
        """

    def decode(self, body: bytes, content_type: str) -> Any:
        """Turn a body of one of `content_types` into an item. May do without the second argument."""
        raise NotImplementedError(f"{type(self).__name__} declares content_types but no decode")

    def encode(self, value: Any, content_type: str) -> bytes:
        """Turn an answer into a body of one of `content_types`. May do without the second argument."""
        raise NotImplementedError(f"{type(self).__name__} declares content_types but no encode")

    @classmethod
    def measure(cls, item: Any) -> Measure | int | None:
        """Say how large an item is, from the item alone: rows, cost, batch key. Runs in the server process for every
        item, so it must be fast and import no model framework. Override it only if items differ."""
        return None

    @classmethod
    def from_function(cls, function: Callable[[list[Any]], Any], /, **attributes: Any) -> "type[Model]":
        """Return a model class whose `predict` is `function`: a list of items in, a list of as many answers out.

        `function` is anything that can be called (a function, a bound method, a numpy function), but no class; its name becomes
        the model's. `attributes` are class attributes of the model: `Input`, `examples`, `max_batch_size` and so on.
        Raises SettingsError if `function` cannot be called, or is a coroutine function.
        """
        if isinstance(function, type) or not callable(function):
            raise SettingsError(f"{function!r:.100}: must be a function: a list of items in, a list of answers out")

        def predict(self: Model, batch: Any) -> Any:
            return function(batch)

        name = getattr(function, "__name__", type(function).__name__)
        named = {
            "__module__": getattr(function, "__module__", None) or "__main__",
            "__qualname__": getattr(function, "__qualname__", name), "__doc__": function.__doc__,
        }  # fmt: skip
        made = type(
            name if name.isidentifier() else "Function",
            (cls,),
            {**attributes, **named, "predict": predict, FUNCTION: staticmethod(function)},
        )
        _check_synchronous(made.__name__, "predict", function)
        return made


M = TypeVar("M", bound=Model)

# The attribute of a class that `Model.from_function` has made: the function.
FUNCTION = "__weir_function__"

# A name this like one of Model's own is taken for a slip of the pen. "encoder" and "preprocessing" are words of their own.
_LIKENESS = 0.85
_DERIVED = ("r", "d", "er", "ed", "or", "ing", "ion")


def overrides(model: type[Model], method: str) -> bool:
    """Tell whether `model` has its own version of `method`."""
    return getattr(model, method) is not getattr(Model, method) and not _same_function(model, method)


def _same_function(model: type[Model], method: str) -> bool:
    own, base = getattr(model, method), getattr(Model, method)
    return getattr(own, "__func__", own) is getattr(base, "__func__", base)


def is_tensor_model(model: type[Model]) -> bool:
    """Tell whether `model` declares tensors."""
    return bool(model.inputs)


def is_batched(model: type[Model]) -> bool:
    """Tell whether requests for `model` may share a batch; otherwise each runs alone."""
    return not model.inputs or model.inputs[0].batch != NONE


def check_model(model: Any) -> type[Model]:
    """Return `model` if it is a usable Model class, or the class that is made of it if it is a function.

    Raises SettingsError, which says what is wrong.
    """
    if callable(model) and not isinstance(model, type):
        model = Model.from_function(model)
    if not (isinstance(model, type) and issubclass(model, Model)):
        raise SettingsError(f"{model!r}: must be a subclass of weir.Model, or a function")
    _check_hooks(model)
    check_attributes(model, [name for name in vars(Model) if not name.startswith("_")])
    if not overrides(model, "predict"):
        raise SettingsError(f"{model.__name__}: must implement predict(batch)")
    _check_content_types(model)
    if bool(model.inputs) != bool(model.outputs):
        raise SettingsError(f"{model.__name__}: a tensor model declares both inputs and outputs")
    if overrides(model, "measure") and not isinstance(_raw(model, "measure"), (classmethod, staticmethod)):
        raise SettingsError(f"{model.__name__}.measure: must be a classmethod or staticmethod (no model exists yet)")
    check_tensors(model)
    if model.streaming:
        _check_not_joined(model, "a streaming model")
    elif not is_batched(model):
        _check_not_joined(model, "a model without batches")
    return model


def _check_content_types(model: type[Model]) -> None:
    """Refuse content types that are no sequence of texts, and those that no method of `model` reads or writes."""
    types: Any = model.content_types
    where = f"{model.__name__}: content_types={types!r:.100}"
    if isinstance(types, str) or not isinstance(types, Sequence) or not all(isinstance(each, str) for each in types):
        raise SettingsError(f'{where}, must be a list of texts, such as ["image/png"]')
    if types and not overrides(model, "decode") and not overrides(model, "encode"):
        raise SettingsError(f"{where}, must implement decode(body), encode(value) or both, which read and write them")


def function_of(model: type[Model]) -> Callable[..., Any] | None:
    """Return the function that `model` was made of by `Model.from_function`; None for any other class."""
    made = vars(model).get(FUNCTION)
    return None if made is None else made.__func__


def check_attributes(model: type[Model], known: Iterable[str]) -> None:
    """Raise SettingsError if a class attribute of `model` is almost, but not quite, one of the names in `known`.

    `max_batchsize` or `preproces` would say nothing to anybody. A name that begins with an underscore is the model's own business.
    """
    wanted = {_plain(name): name for name in known}
    own = [name for kind in model.__mro__ if issubclass(kind, Model) and kind is not Model for name in vars(kind)]
    for name in own:
        if name.startswith("_") or hasattr(Model, name) or name in wanted.values():
            continue
        nearest = _nearest(_plain(name), wanted)
        if nearest is not None:
            raise SettingsError(
                f"{model.__name__}.{name}: there is no such attribute; did you mean {nearest}? "
                f"(An attribute of your own may be called _{name}.)"
            )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _nearest(name: str, wanted: Mapping[str, str]) -> str | None:
    if name in wanted:
        return wanted[name]
    for other, original in wanted.items():
        if any(name == other + ending or name == other.removesuffix("e") + ending for ending in _DERIVED):
            return None
        if len(other) >= 5 and name[0] == other[0] and SequenceMatcher(None, name, other).ratio() >= _LIKENESS:
            return original
    return None


def _check_hooks(model: type[Model]) -> None:
    """Refuse hooks that return a coroutine: a worker does not await it."""
    for name in vars(Model):
        hook = getattr(model, name)
        if not name.startswith("_") and callable(hook) and not isinstance(hook, type):
            _check_synchronous(model.__name__, name, hook)


def _check_synchronous(model: str, name: str, hook: Any) -> None:
    if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
        raise SettingsError(
            f"{model}.{name}: is an async function, but workers have no event loop; it must be a plain function (def)"
        )


def _check_not_joined(model: type[Model], what: str) -> None:
    """Refuse attributes for batches where a model gets its requests one by one: nothing is joined, padded or filled up for it."""
    varying = [f"{tensor.name!r} varies" for tensor in model.inputs if tensor.varying != GROUP]
    sizes = ["allowed_batch_sizes is set"] if model.allowed_batch_sizes is not None else []
    buffers = ["it has input_buffers"] if overrides(model, "input_buffers") else []
    for said in (*varying, *sizes, *buffers):
        raise SettingsError(f"{model.__name__}: {said}, but {what} gets the requests one by one, as they are")


def _raw(model: type[Model], name: str) -> Any:
    return next(vars(base)[name] for base in model.__mro__ if name in vars(base))


def check_tensors(model: type[Model]) -> None:
    """Raise SettingsError unless what `model` declares of tensors and batch sizes can be."""
    for tensors in (model.inputs, model.outputs):
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            _check_tensor(model, tensor)
            if names.count(tensor.name) > 1:
                raise _wrong(model, tensor, "is declared twice")
    given = {tensor.name for tensor in model.inputs}
    for tensor in model.inputs:
        _check_varying(model, tensor)
        if tensor.optional and tensor.varying != GROUP:
            raise _wrong(model, tensor, f"is optional and has varying={tensor.varying!r}; only one may be")
        if tensor.varying != GROUP and tensor.lengths_name in given:
            raise _wrong(model, tensor, f"has lengths={tensor.lengths_name!r}, which is an input already")
    for tensor in model.outputs:
        _check_like(model, tensor)
        if tensor.optional or tensor.format:
            raise _wrong(model, tensor, "is optional or has a format, which is for inputs")
    sizes = model.allowed_batch_sizes
    if sizes is not None and not (sizes and all(isinstance(size, int) and size >= 1 for size in sizes)):
        raise SettingsError(f"{model.__name__}: allowed_batch_sizes={sizes!r}, must be whole numbers of at least 1")


def _check_tensor(model: type[Model], tensor: Tensor) -> None:
    if tensor.datatype not in DATATYPES:
        raise _wrong(model, tensor, f"has datatype {tensor.datatype!r}, not one of {', '.join(DATATYPES)}")
    if tensor.batch not in (REQUIRED, OPTIONAL, NONE):
        raise _wrong(model, tensor, f"has batch={tensor.batch!r}, must be {REQUIRED!r}, {OPTIONAL!r} or {NONE!r}")
    if tensor.batch != model.inputs[0].batch:
        first = model.inputs[0]
        raise _wrong(model, tensor, f"has batch={tensor.batch!r}, {first.name!r} {first.batch!r}; they must be equal")
    if tensor.format not in FORMATS:
        raise _wrong(
            model, tensor, f"has format={tensor.format!r}, must be one of {', '.join(FORMATS[1:])}, or nothing"
        )
    if any(length < -1 or length == 0 for length in tensor.shape):
        raise _wrong(model, tensor, f"has shape {list(tensor.shape)}; each length is positive or -1")
    if not tensor.shape and tensor.batch != NONE:
        raise _wrong(
            model, tensor, "has shape []; it starts with the batch dimension (a model without has batch='none')"
        )


def _check_varying(model: type[Model], tensor: Tensor) -> None:
    if tensor.like:
        raise _wrong(model, tensor, f"has like={tensor.like!r}, which is for outputs")
    if tensor.varying not in (GROUP, PAD, RAGGED):
        raise _wrong(model, tensor, f"has varying={tensor.varying!r}, must be {GROUP!r}, {PAD!r} or {RAGGED!r}")
    if tensor.varying == PAD and not tensor.variable:
        raise _wrong(model, tensor, f"has shape {list(tensor.shape)}; to be padded it must have a -1 besides the first")
    if tensor.varying == RAGGED and tensor.variable != (1,):
        raise _wrong(model, tensor, f"has shape {list(tensor.shape)}; only the second length of a ragged one is -1")
    wanted = bytes if tensor.datatype == "BYTES" and tensor.pad_value != 0 else (bool, int, float)
    if not isinstance(tensor.pad_value, wanted):
        raise _wrong(model, tensor, f"has pad_value={tensor.pad_value!r}, which is no {tensor.datatype}")


def _check_like(model: type[Model], tensor: Tensor) -> None:
    if tensor.varying != GROUP:
        raise _wrong(model, tensor, f"has varying={tensor.varying!r}, which is for inputs")
    if not tensor.like:
        return
    known = {each.name: each for each in model.inputs if each.varying != GROUP}
    if tensor.like not in known:
        raise _wrong(model, tensor, f"has like={tensor.like!r}, which is no padded or ragged input")
    source = known[tensor.like]
    places = tensor.variable == (1,) if source.varying == RAGGED else len(tensor.variable) == len(source.variable)
    if not places:
        shapes = f"{list(tensor.shape)}, {source.varying} input {source.name!r} {list(source.shape)}"
        raise _wrong(model, tensor, f"has shape {shapes}; they must have -1 alike")


def _wrong(model: type[Model], tensor: Tensor, what: str) -> SettingsError:
    return SettingsError(f"{model.__name__}: tensor {tensor.name!r} {what}")


# A model without code of its own: its workers attach from outside.


class External(Model):
    """Serve this, or a subclass of it, for a model whose workers are programs of their own, in any language.

    They attach to the setting `worker_socket`, pull batches and leave as they like. Request bodies reach them as they came,
    and what they answer is the response. A subclass may say `content_types`, `measure`, `examples` and settings.
    """

    executor: ClassVar[str] = "external"

    def predict(self, batch: Any) -> Any:
        """Refuse: there is nothing here that could."""
        raise Unsupported(f"{type(self).__name__}: its workers attach from outside (executor=external)")

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return the body as it is."""
        return body

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return the answer as it is."""
        return bytes(value)
