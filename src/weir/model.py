"""The class that users implement: Model, with `predict` and any of its other methods and attributes.

The server process uses only the class itself (its attributes, `measure`, `examples`); instances exist only in workers.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

from weir.errors import InvalidRequest, SettingsError, Unsupported
from weir.metrics import ModelMetrics
from weir.plugins import Plugins

# numpy's names of the datatypes of the Open Inference Protocol. numpy has no BF16: its arrays have the bits.
DATATYPES = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16", "FP32": "float32", "FP64": "float64",
    "BYTES": "object", "BF16": "uint16",
}  # fmt: skip

# How requests of different lengths are batched (Tensor.varying).
GROUP, PAD, RAGGED = "group", "pad", "ragged"

# Whether the first dimension of a request's tensors is the batch (Tensor.batch).
REQUIRED, OPTIONAL, NONE = "required", "optional", "none"

# The order of an image's dimensions (Tensor.format).
FORMATS = ("", "FORMAT_NHWC", "FORMAT_NCHW")


class Tensor(NamedTuple):
    """Declares one tensor of a tensor model.

    Attributes:
        name: its name in requests and in the batch of `predict`.
        datatype: as in the Open Inference Protocol; see DATATYPES.
        shape: its shape with the batch as first dimension; -1 stands for any length.
        varying: how requests are batched in which the other -1 of an input have different lengths. "group": only requests of
            equal lengths share a batch. "pad": each row is filled up with `pad_value` to the longest in the batch. "ragged":
            the rows, whose second dimension varies, are concatenated without that dimension; a model with `separate` gets
            requests of any lengths as they are.
        pad_value: the value for padding.
        lengths: the name under which `predict` gets the true lengths of a padded or ragged input; by default its name and
            "_lengths". They are INT64, of shape (rows,), or (rows, n) with several -1.
        like: for an output, the name of a padded or ragged input. The output's -1 have the same lengths as that input's:
            `predict` returns it padded or ragged too, and each request gets its own rows in their true lengths.
        batch: whether requests have the batch dimension; equal for all tensors of a model. "required"; "optional": a request
            of the Open Inference Protocol may leave it out of all its tensors, which means one row, and is answered without
            it; "none": the model cannot batch. Then `shape` is the whole shape ([] is a scalar), and each request runs alone.
        optional: whether a request may leave the input out. It is not in the batch of `predict` then.
        format: the order of an image's dimensions, such as FORMAT_NCHW. It is only shown in the model's configuration.
        reshape: the shape that an ONNX file has instead of this one; both without the batch.
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
    format: str = ""
    reshape: Sequence[int] | None = None

    @property
    def lengths_name(self) -> str:
        """The name under which `predict` gets the true lengths of this input."""
        return self.lengths or f"{self.name}_lengths"

    @property
    def variable(self) -> tuple[int, ...]:
        """The indices of the dimensions, besides the first, that may have any length."""
        return tuple(axis for axis, length in enumerate(self.shape) if axis and length == -1)


class Measure(NamedTuple):
    """The size of an item, which `Model.measure` may return before the item enters the queue.

    `max_batch_size` limits the `rows` of a batch and `max_batch_cost` its `cost`; only items of equal `key` share a batch.
    """

    rows: int = 1
    cost: float = 1.0
    key: str | int | tuple[Any, ...] | None = None


class Example(NamedTuple):
    """An example item and, if known, the expected result, which the deep health check and `weir check` compare."""

    item: Any
    expected: Any = ...


class Last(NamedTuple):
    """The last result of an item, as the `predict` of a streaming model may yield it."""

    result: Any


class Model:
    """Subclass this, implement `predict`, and serve the class.

    Each worker calls the constructor with the given parameters, `load_shared` and `load`, and runs the warm-up on `examples`. Then for
    each batch it calls `decode` (only for `content_types`), validates items against `Input`, calls `preprocess` for each item (or
    `preprocess_batch`), `predict`, `postprocess` for each item (or `postprocess_batch`), validates results against `Output`, and
    calls `encode`. At shutdown it calls `unload`.

    A RequestError, such as InvalidRequest or ValidationFailed, fails a single item: `preprocess` may raise it, and `predict` and the
    batch forms may return it in the item's place. Any other exception is a ModelError of the item (`preprocess`, `postprocess`) or
    of the batch (`predict`), which is then rerun in halves, so that only the items that cause it fail.
    """

    # Types of an item and of a result: a pydantic model, a msgspec struct, or anything that msgspec can convert to.
    Input: ClassVar[Any] = None
    Output: ClassVar[Any] = None

    # Whether items may be texts. An element in the Open Inference Protocol is then plain text, not a JSON document.
    plain_texts: ClassVar[bool] = False

    # A tensor model declares these; `predict` then gets and returns a dict of arrays.
    inputs: ClassVar[Sequence[Tensor]] = ()
    outputs: ClassVar[Sequence[Tensor]] = ()
    # For a model that was compiled for certain batch sizes: each batch is filled up to the next of these sizes with copies of its
    # last row or item, whose results are dropped. `max_batch_size` must be at most the largest of them.
    allowed_batch_sizes: ClassVar[Sequence[int] | None] = None
    # Why the tensors of the model have no batch (Tensor.batch); shown in its configuration.
    unbatched: ClassVar[str] = ""
    # False: the arrays that `predict` gets are read-only and valid until it returns, as large ones lie where the request was
    # received. True: they are writable copies.
    owns_inputs: ClassVar[bool] = False

    # For a tensor model: `predict` gets a list of dicts of arrays, one for each request, and returns a list of as many, in which a
    # WeirError fails that request only. Otherwise the requests of a batch are joined.
    separate: ClassVar[bool] = False
    # For adapters of tensor models: the arrays of a request of the Open Inference Protocol come as ArraysWithHead, with its id and
    # parameters, where it has any.
    keeps_head: ClassVar[bool] = False
    # For adapters of models that declare no tensors, but get any: an item is a whole request of the Open Inference Protocol, a dict
    # with its `id`, `parameters`, `inputs` (name, datatype, array and parameters of each) and `outputs` (name and parameters). An
    # result is a dict with `outputs`, like inputs, and `parameters`.
    takes_requests: ClassVar[bool] = False

    # Items, or Examples, for the warm-up, the deep health check and OpenAPI. For a tensor model, dicts of arrays or lists.
    examples: ClassVar[Sequence[Any]] = ()
    # Batch sizes to warm up at; None means 1, the largest, and one between.
    warmup_sizes: ClassVar[Sequence[int] | None] = None

    # Whether `predict` is a generator that gives several results for an item; see `predict`.
    streaming: ClassVar[bool] = False

    # The model's own content types, which `decode` reads and `encode` writes.
    content_types: ClassVar[Sequence[str]] = ()

    # Defaults for the settings of the same names; flags, TOML and keyword arguments override them. None: Weir's own default.
    workers: ClassVar[int | None] = None
    max_batch_size: ClassVar[int | None] = None
    max_batch_cost: ClassVar[float | None] = None
    # Whether costs are lengths, so that a batch costs its rows times its longest row.
    padded: ClassVar[bool | None] = None
    max_padding: ClassVar[float | None] = None
    padding_cost: ClassVar[float | None] = None
    max_queue_delay: ClassVar[float | None] = None
    max_queue_size: ClassVar[int | None] = None
    policy: ClassVar[Any] = None
    pipeline_depth: ClassVar[int | None] = None
    predict_timeout: ClassVar[float | None] = None

    # Set by the worker before `load`: the index of this worker, from 0.
    worker_index: int = 0
    # Set by the worker before `predict`: the `share` of the batch (see messages.Batch).
    _share: int = 1
    # Also set by the worker, for `output`: returns a new array of this shape and dtype.
    _allocate: Callable[[tuple[int, ...], Any], Any] | None = None

    @cached_property
    def metrics(self) -> ModelMetrics:
        """The model's own metrics, which `/metrics` shows: `counter`, `gauge` and `histogram` return one of a name. Make them in `load`.

        What a worker counts is reported with the next results, and added up over all workers. The warm-up does not count. External
        workers have none.
        """
        return ModelMetrics()

    def load_shared(self) -> None:
        """Load what all workers share and only read afterwards, such as weights.

        If a model overrides this, its worker processes are forked from a process in which the constructor and this method have been
        called, so that what it loads is in memory once. When it returns, no thread may be running, and nothing may be open that a
        forked process cannot use, such as a session on a GPU or a connection. With worker threads, it is called once, in the first
        thread, and each thread has a shallow copy of that model. Inline and external workers call it before `load`.
        """

    def load(self) -> None:
        """Load weights. The worker calls this once, before the first batch; an exception fails the start."""

    def input_buffers(self, rows: int) -> Mapping[str, Any]:
        """Return arrays by input name into which each batch of a tensor model is gathered, such as pinned memory, or the memory that a
        compiled model is bound to. The worker calls this once, after `load`.

        An array must have room for `rows` rows, the largest batch. `predict` gets its first rows, which are writable. A padded input
        is padded to the array's lengths. A batch that does not fit into an array comes as if there were none.
        """
        return {}

    def output(self, name: str, *shape: int) -> Any:
        """Return a new array of this shape (rows first), which `predict` can fill and return as the output `name`.

        Its contents are arbitrary. A large array lies in shared memory, if there is room, and reaches the server without a copy. It
        is valid for one batch; a streaming model must not write to it after it has yielded it. Raises KeyError if the model
        declares no such output.
        """
        import numpy  # only tensor models need it

        dtype = numpy.dtype(DATATYPES[{tensor.name: tensor.datatype for tensor in self.outputs}[name]])
        return numpy.empty(shape, dtype) if self._allocate is None else self._allocate(shape, dtype)

    def torch_device(self, wanted: str = "auto") -> str:
        """Return the name of the device for a network of torch: "cpu", "mps", or "cuda:" and a number. Call it in `load`.

        "auto" and "cuda" give the workers the GPUs in turn; without a GPU, "auto" is the CPU. Any other name stays as it is. The
        log says which device the worker got. Raises SettingsError for a GPU that the machine has not.

        It also turns cuDNN's attention off, see `take_any_shape`.
        """
        import logging  # not above: a worker process imports this module before it may load more

        import torch  # only models of torch call this

        device = _device(wanted, self.worker_index, torch.cuda.device_count(), torch.backends.mps.is_available)
        logging.getLogger("weir").info("worker %d computes on %s", self.worker_index, device)
        take_any_shape(torch)
        return device

    def preprocess(self, item: Any) -> Any:
        """Return what `predict` gets for one decoded and validated item."""
        return item

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return what `predict` gets for all items of a batch, in order. An error in an item's place fails that item only.

        This may be overridden instead of `preprocess`; if both are, this one is used.
        """
        raise NotImplementedError  # never called unless overridden

    def predict(self, batch: Any) -> Any:
        """Compute the results of a batch: take a list of preprocessed items, and return a list of as many results, in order.

        A tensor model gets a dict of arrays and returns one, with the batch as first dimension; or without a batch (Tensor.batch),
        the arrays of one request.

        For a streaming model, this is a generator. It gets the list of preprocessed items (for a tensor model, a list of dicts of
        arrays, one per request) and yields dicts with the results to give now, by index in that list. An item may have any number
        of results. `Last(result)` is an item's last result, and a WeirError ends that item only; when `predict` returns, all other
        items end too. Each `yield` returns a frozenset of the indices of items that have ended, by `Last`, by an error or because
        their readers have left. Compute nothing more for them: further results for them are dropped. When no item is left, the
        generator is closed (GeneratorExit). An exception after the first `yield` is a ModelError of all items that have not ended;
        nothing is computed again.
        """
        raise NotImplementedError(f"{type(self).__name__}.predict is not implemented")

    def postprocess(self, item: Any, *preprocessed: Any) -> Any:
        """Return the response to the caller for one result of `predict`. An override may take the preprocessed item as second
        argument."""
        return item

    def postprocess_batch(self, items: list[Any]) -> list[Any]:
        """Return the responses to the callers for all results of a batch, in order. This may be overridden instead of `postprocess`; if
        both are, this one is used."""
        raise NotImplementedError  # never called unless overridden

    def unload(self) -> None:
        """Free what `load` has taken. The worker calls this when it is stopped, but not when it is killed.

        An override with a parameter, `unload(self, error=None)`, is also called when an exception of the model ends the worker,
        which may be one in the warm-up or SystemExit. `error` is that exception, or None when the worker was stopped.
        """

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return the item in a body of one of `content_types`. An override may leave the second parameter out."""
        raise NotImplementedError(f"{type(self).__name__} declares content_types but no decode")

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return the body of one of `content_types` for a result. An override may leave the second parameter out."""
        raise NotImplementedError(f"{type(self).__name__} declares content_types but no encode")

    @classmethod
    def measure(cls, item: Any) -> Measure | int | None:
        """Return the size of an item: its rows, or a Measure with rows, cost and batch key; None for one row of cost 1.

        This runs in the server process for every item, so it must be fast and import no model framework. Override it only if items
        differ in size.
        """
        return None

    @classmethod
    def from_function(cls, function: Callable[[list[Any]], Any], /, **attributes: Any) -> "type[Model]":
        """Return a model class whose `predict` is `function`, which takes a list of items and returns a list of as many results.

        `function` may be anything that can be called (a function, a bound method, a numpy function) except a class; its name becomes
        the model's name. `attributes` are class attributes of the model: `Input`, `examples`, `max_batch_size` and so on.
        Raises SettingsError if `function` cannot be called, or is a coroutine function.
        """
        if isinstance(function, type) or not callable(function):
            raise SettingsError(f"{function!r:.100}: must be a function: a list of items in, a list of results out")

        def predict(self: Model, batch: Any) -> Any:
            return function(batch)

        name = getattr(function, "__name__", type(function).__name__)
        named = {
            "__module__": getattr(function, "__module__", None) or "__main__",
            "__qualname__": getattr(function, "__qualname__", name),
            "__doc__": function.__doc__,
        }
        made = type(
            name if name.isidentifier() else "Function",
            (cls,),
            {**attributes, **named, "predict": predict, FUNCTION: staticmethod(function), ATTRIBUTES: attributes},
        )
        _check_synchronous(made.__name__, "predict", function)
        return made


def take_any_shape(torch: Any) -> None:
    """Turn cuDNN's attention off in this process: other kernels of torch compute it.

    cuDNN makes a plan for each shape, which takes 45 to 50 ms on an H100 (torch 2.11), a dozen times what a small batch takes; batches have many shapes.
    A model whose batches have one shape may turn it on again: `torch.backends.cuda.enable_cudnn_sdp(True)`.
    """
    switch = getattr(torch.backends.cuda, "enable_cudnn_sdp", None)  # since torch 2.5
    if switch is not None:
        switch(False)


def _device(wanted: str, worker: int, gpus: int, has_mps: Callable[[], bool]) -> str:
    if wanted == "auto" and not gpus:
        return "mps" if has_mps() else "cpu"
    if wanted in ("auto", "cuda") and gpus:
        return f"cuda:{worker % gpus}"
    kind, _, number = wanted.partition(":")
    if kind == "cuda" and (not number.isdigit() or int(number) >= gpus):
        raise SettingsError(f"device={wanted!r}: torch sees {gpus} GPUs here; must be auto, cpu or one of them")
    return wanted


M = TypeVar("M", bound=Model)

# The attributes of a class made by `Model.from_function` that hold the function, and what else the class was given.
FUNCTION, ATTRIBUTES = "__weir_function__", "__weir_attributes__"


@overload
def model(function: Callable[[list[Any]], Any], /, **attributes: Any) -> type[Model]: ...
@overload
def model(**attributes: Any) -> Callable[[Callable[[list[Any]], Any]], type[Model]]: ...
def model(function: Callable[[list[Any]], Any] | None = None, /, **attributes: Any) -> Any:
    """Return a model class made from a function that takes a list of items and returns one result for each.

    It is also a decorator, with or without attributes of the class (`max_batch_size`, `Input`, `examples` and so on):

        @weir.model(max_batch_size=64)
        def areas(batch):
            return numpy.pi * numpy.asarray(batch) ** 2

    Raises SettingsError as `Model.from_function` does.
    """
    if function is None:
        return lambda decorated: Model.from_function(decorated, **attributes)
    return Model.from_function(function, **attributes)


# A name that is so similar to an attribute of Model counts as a typing mistake, unless it is another word, such as "encoder".
_LIKENESS = 0.85
_DERIVED = ("r", "d", "er", "ed", "or", "ing", "ion")


def overrides(model: type[Model], method: str) -> bool:
    """Return whether `model` has its own version of `method`."""
    return getattr(model, method) is not getattr(Model, method) and not _same_function(model, method)


def _same_function(model: type[Model], method: str) -> bool:
    own, base = getattr(model, method), getattr(Model, method)
    return getattr(own, "__func__", own) is getattr(base, "__func__", base)


def is_tensor_model(model: type[Model]) -> bool:
    """Return whether `model` declares tensors."""
    return bool(model.inputs)


class Sizes:
    """The batch sizes that a compiled model allows (Model.allowed_batch_sizes); any size, if it declares none."""

    def __init__(self, model: type[Model]) -> None:
        self._allowed = sorted(model.allowed_batch_sizes or ())

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def filled(self, rows: int) -> int:
        """Return how many rows `predict` gets for a batch of `rows`. Raises InvalidRequest for more than the largest size."""
        if not self._allowed:
            return rows
        for size in self._allowed:
            if size >= rows:
                return size
        raise InvalidRequest(f"a batch of {rows} rows: the model takes {self._allowed[-1]} at most")


def is_batched(model: type[Model]) -> bool:
    """Return whether requests for `model` may share a batch; otherwise each runs alone."""
    return not model.inputs or model.inputs[0].batch != NONE


class Adapter(NamedTuple):
    """Makes a class of another server a model, by the base class that adapts it, which precedes Model, and attributes of the model."""

    base: type
    attributes: dict[str, Any]


# Functions that return the Adapter of a class of another server, by the name of the base class by which they recognise it.
ADAPTERS = Plugins(
    "adapter",
    "weir.adapters",
    {
        "mosec.worker.Worker": "weir.catalog.adapters.classes:adapt_mosec",
        "litserve.api.LitAPI": "weir.catalog.adapters.classes:adapt_litserve",
    },
)


def class_names(kind: type) -> list[str]:
    """Return the names of a class and its bases, with their modules."""
    return [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]


def adapted(found: type) -> type[Model] | None:
    """Return a model class for a class of another server that one of ADAPTERS knows; None for any other. Raises SettingsError for what cannot be
    adapted."""
    known = set(ADAPTERS.names())
    name = next((name for name in class_names(found) if name in known), None)
    if name is None:
        return None
    adapter: Adapter = ADAPTERS.load(name)(found)
    named = {
        "__module__": found.__module__,
        "__qualname__": found.__qualname__,
        "__signature__": inspect.signature(found),
    }
    own = {**adapter.attributes, **named, "foreign": found, FUNCTION: staticmethod(found), ATTRIBUTES: {}}
    return type(found.__name__, (adapter.base, Model), own)


def check_model(model: Any) -> type[Model]:
    """Return `model` if it is a usable Model class; for a function, return a model class made of it.

    A class of another server is adapted. Raises SettingsError that says what is wrong.
    """
    if callable(model) and not isinstance(model, type):
        model = Model.from_function(model)
    elif isinstance(model, type) and not issubclass(model, Model):
        model = adapted(model) or model
    if not (isinstance(model, type) and issubclass(model, Model)):
        hint = f"; give the class: {type(model).__name__}" if isinstance(model, Model) else ""
        raise SettingsError(f"{model!r}: must be a subclass of weir.Model, or a function{hint}")
    _check_hooks(model)
    check_attributes(model, [name for name in vars(Model) if not name.startswith("_")])
    if not overrides(model, "predict"):
        raise SettingsError(f"{model.__name__}: must implement predict(batch)")
    _check_takes_batch(model)
    _check_content_types(model)
    if bool(model.inputs) != bool(model.outputs):
        raise SettingsError(f"{model.__name__}: a tensor model declares both inputs and outputs")
    if overrides(model, "measure") and not isinstance(_raw(model, "measure"), (classmethod, staticmethod)):
        raise SettingsError(
            f"{model.__name__}.measure: must be a classmethod or staticmethod (the server process has no instance)"
        )
    check_tensors(model)
    if model.streaming:
        _check_not_joined(model, "a streaming model")
    elif not is_batched(model):
        _check_not_joined(model, "a model without batches")
    return model


def _check_content_types(model: type[Model]) -> None:
    """Raise SettingsError unless content_types is a sequence of texts that a method of `model` reads or writes."""
    types: Any = model.content_types
    where = f"{model.__name__}: content_types={types!r:.100}"
    if isinstance(types, str) or not isinstance(types, Sequence) or not all(isinstance(each, str) for each in types):
        raise SettingsError(f'{where}, must be a list of texts, such as ["image/png"]')
    if types and not overrides(model, "decode") and not overrides(model, "encode"):
        raise SettingsError(f"{where}, must implement decode(body), encode(value) or both, which read and write them")


def function_of(model: type[Model]) -> Callable[..., Any] | None:
    """Return the function of a model made by `Model.from_function`; None for any other class."""
    made = vars(model).get(FUNCTION)
    return None if made is None else made.__func__


def check_attributes(model: type[Model], known: Iterable[str]) -> None:
    """Raise SettingsError if a class attribute of `model` has a name that is similar, but not equal, to one in `known`.

    An attribute such as `max_batchsize` or `preproces` would have no effect. Names that begin with an underscore are not checked.
    """
    wanted = {_plain(name): name for name in known}
    own = [name for kind in model.__mro__ if issubclass(kind, Model) and kind is not Model for name in vars(kind)]
    for name in own:
        if name.startswith("_") or hasattr(Model, name) or name in wanted.values():
            continue
        nearest = _nearest(_plain(name), wanted)
        if nearest is not None:
            raise SettingsError(
                f"{model.__name__}.{name}: unknown attribute; did you mean {nearest}? "
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
    """Raise SettingsError for methods that return a coroutine, which a worker would not await."""
    for name in vars(Model):
        hook = getattr(model, name)
        if not name.startswith("_") and callable(hook) and not isinstance(hook, type):
            _check_synchronous(model.__name__, name, hook)


def _check_synchronous(model: str, name: str, hook: Any) -> None:
    if inspect.iscoroutinefunction(hook) or inspect.isasyncgenfunction(hook):
        raise SettingsError(
            f"{model}.{name}: is an async function, but workers have no event loop; it must be a plain function (def)"
        )


def _check_takes_batch(model: type[Model]) -> None:
    predict = _raw(model, "predict")
    if inspect.isfunction(predict):  # of others, such as a staticmethod, the signature may say too little
        signature = inspect.signature(predict)
        try:
            signature.bind(None, None)
        except TypeError:
            raise SettingsError(f"{model.__name__}.predict{signature}: must be predict(self, batch)") from None


def _check_not_joined(model: type[Model], what: str) -> None:
    """Raise SettingsError for attributes that are for batches if the model gets its requests one by one."""
    varies = (PAD,) if model.separate else (PAD, RAGGED)  # it knows that it gets ragged ones as they are
    varying = [f"{tensor.name!r} varies" for tensor in model.inputs if tensor.varying in varies]
    sizes = ["allowed_batch_sizes is set"] if model.allowed_batch_sizes is not None else []
    buffers = ["it has input_buffers"] if overrides(model, "input_buffers") else []
    for wrong in (*varying, *sizes, *buffers):
        raise SettingsError(f"{model.__name__}: {wrong}, but {what} gets the requests one by one, as they are")


def _raw(model: type[Model], name: str) -> Any:
    return next(vars(base)[name] for base in model.__mro__ if name in vars(base))


def check_tensors(model: type[Model]) -> None:
    """Raise SettingsError unless the tensors and batch sizes that `model` declares are valid."""
    for tensors in (model.inputs, model.outputs):
        names = [tensor.name for tensor in tensors]
        for tensor in tensors:
            _check_tensor(model, tensor)
            if names.count(tensor.name) > 1:
                raise _wrong(model, tensor, "is declared twice")
    given = {tensor.name for tensor in model.inputs}
    for tensor in model.inputs:
        _check_varying(model, tensor)
        if tensor.varying == RAGGED and model.separate:
            continue
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
            model, tensor, "has shape []; it must start with the batch dimension (without one, set batch='none')"
        )


def _check_varying(model: type[Model], tensor: Tensor) -> None:
    if tensor.like:
        raise _wrong(model, tensor, f"has like={tensor.like!r}, which is for outputs")
    if tensor.varying not in (GROUP, PAD, RAGGED):
        raise _wrong(model, tensor, f"has varying={tensor.varying!r}, must be {GROUP!r}, {PAD!r} or {RAGGED!r}")
    if tensor.varying == PAD and not tensor.variable:
        raise _wrong(model, tensor, f"has shape {list(tensor.shape)}; to be padded it must have a -1 besides the first")
    if tensor.varying == RAGGED and tensor.variable != (1,) and not model.separate:
        raise _wrong(model, tensor, f"has shape {list(tensor.shape)}; only the second length of a ragged one is -1")
    wanted = bytes if tensor.datatype == "BYTES" and tensor.pad_value != 0 else (bool, int, float)
    if not isinstance(tensor.pad_value, wanted):
        raise _wrong(model, tensor, f"has pad_value={tensor.pad_value!r}, which is not a {tensor.datatype}")


def _check_like(model: type[Model], tensor: Tensor) -> None:
    if tensor.varying != GROUP:
        raise _wrong(model, tensor, f"has varying={tensor.varying!r}, which is for inputs")
    if not tensor.like:
        return
    known = {each.name: each for each in model.inputs if each.varying != GROUP}
    if tensor.like not in known:
        raise _wrong(model, tensor, f"has like={tensor.like!r}, which is not a padded or ragged input")
    source = known[tensor.like]
    places = tensor.variable == (1,) if source.varying == RAGGED else len(tensor.variable) == len(source.variable)
    if not places:
        shapes = f"{list(tensor.shape)}, {source.varying} input {source.name!r} {list(source.shape)}"
        raise _wrong(model, tensor, f"has shape {shapes}; they must have -1 alike")


def _wrong(model: type[Model], tensor: Tensor, what: str) -> SettingsError:
    return SettingsError(f"{model.__name__}: tensor {tensor.name!r} {what}")


class External(Model):
    """Serve this class, or a subclass, for a model whose workers are separate programs in any language.

    The workers connect to the address in the setting `worker_socket`, pull batches, and may leave at any time. They get request bodies
    as they came, and their results go back as they are. A subclass may have `content_types`, `measure`, `examples` and settings.
    """

    executor: ClassVar[str] = "external"

    def predict(self, batch: Any) -> Any:
        """Raise Unsupported: the workers compute, not this class."""
        raise Unsupported(f"{type(self).__name__}: its workers attach from outside (executor=external)")

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return the body unchanged."""
        return body

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return the result unchanged."""
        return bytes(value)
