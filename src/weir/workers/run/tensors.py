"""Tensor models: joins the entries of a batch into the arrays that `predict` gets, and checks and divides the arrays that it returns.

Arrays in shared memory are read and written without copying where that is possible (`adjoined`, `lease`, `allocator`).

Undecoded JSON bodies of the Open Inference Protocol are read here too, and responses written as such. Most requests have the model's inputs in their declared
order, and flat data. For these msgspec checks names, datatypes and every element while it decodes. All others are read by a slower function, which also says
what is wrong.
"""

import math
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from types import GenericAlias
from typing import Any, Literal, NamedTuple

import msgspec
import numpy
from numpy.lib.stride_tricks import as_strided

from weir.errors import InvalidRequest, ModelError, SettingsError, WeirError
from weir.messages import JSON, KSERVE, MSGPACK, OBJECT, PACKED, parts_of
from weir.model import GROUP, PAD, RAGGED, Model, Sizes, Tensor, is_batched, overrides
from weir.wire.cells import LARGE_BYTES
from weir.wire.inference import Parameters, RequestedOutput, ResponseHead, bind, take_head
from weir.wire.kserve_json import ReadOutput, WrittenResponse, WrittenTensor, encode, read_request
from weir.wire.tensors import (
    DTYPES,
    ELEMENT_TYPES,
    Arrays,
    Unpacker,
    array_of,
    check_bound,
    element_count,
    pack,
    read_arrays,
    rows_of,
    to_arrays,
    to_bits,
    to_plain,
    to_text,
    write_elements,
)
from weir.wire.values import DECODE, ENCODE, UNREADABLE, has_slow_floats
from weir.workers.arena import SharedBlock

MAX_REMEMBERED = 256  # combinations of shapes whose facts are kept

Shapes = tuple[tuple[int, ...], ...]


class ArraysWithHead(Arrays):
    """The arrays of a request, with its head."""

    __slots__ = ("head",)

    def __init__(self, arrays: Arrays, head: ResponseHead) -> None:
        super().__init__(arrays)
        self.head = head


class ShapeFacts(NamedTuple):
    """The facts that follow from the shapes of a request's tensors: the number of elements of each, the number of rows, and the other lengths of each
    (the same object where they are equal)."""

    counts: list[int]
    rows: int
    tails: Shapes


class Listed:
    """The tensors of a request as flat lists, checked, in the declared order: the arrays of a batch are made from all its lists at once."""

    __slots__ = ("head", "lists", "shapes", "tails", "rows")

    def __init__(self, head: ResponseHead, lists: list[list[Any]], shapes: Shapes, learned: ShapeFacts) -> None:
        self.head = head
        self.lists = lists
        self.shapes = shapes
        self.rows = learned.rows
        self.tails = learned.tails

    def arrays(self, declared: Sequence[Tensor]) -> ArraysWithHead:
        """Return the request with arrays of its own. Raises InvalidRequest for an integer beyond 64 bits."""
        arrays = {
            tensor.name: array_of(tensor.name, tensor.datatype, values).reshape(shape)
            for tensor, values, shape in zip(declared, self.lists, self.shapes, strict=True)
        }
        return ArraysWithHead(arrays, self.head)


def joined(entries: Sequence[Listed], declared: Sequence[Tensor]) -> Arrays | None:
    """Return the arrays of a batch; None if the lengths of its entries differ in more than the rows."""
    tails = entries[0].tails
    if any(entry.tails is not tails for entry in entries):
        return None
    rows = sum([entry.rows for entry in entries])
    arrays = {}
    for index, (tensor, tail) in enumerate(zip(declared, tails, strict=True)):
        values = list(chain.from_iterable([entry.lists[index] for entry in entries]))
        arrays[tensor.name] = array_of(tensor.name, tensor.datatype, values).reshape(rows, *tail)
    return arrays


def joins_lists(model: type[Model]) -> bool:
    """Return whether `joined` can do everything that `model` needs done with its entries before `predict`. UINT64 is excluded: an integer beyond 64
    bits shows only in the array, and would fail the whole batch."""
    if (
        model.streaming
        or model.allowed_batch_sizes
        or not is_batched(model)
        or any(map(partial(overrides, model), _SEE_ENTRIES))
    ):
        return False
    return all(tensor.varying == GROUP and tensor.datatype != "UINT64" for tensor in model.inputs)


_SEE_ENTRIES = ("preprocess", "preprocess_batch", "postprocess", "input_buffers")


def head_of(item: Any) -> ResponseHead | None:
    """Return the head of a request that was read here; None for another item."""
    return item.head if type(item) in (Listed, ArraysWithHead) else None


class BodyReader:
    """Reads bodies for one model."""

    def __init__(self, model: type[Model]) -> None:
        self._declared = tuple(model.inputs)
        self._outputs = [tensor.name for tensor in model.outputs]
        self._keeps_head = model.keeps_head
        self._decode = _decoder(self._declared, model.keeps_head)
        self._lists = joins_lists(model)
        self._known: dict[Shapes, ShapeFacts] = {}
        self._tails: dict[Shapes, Shapes] = {}

    def __call__(self, body: bytes | memoryview) -> Listed | ArraysWithHead:
        """Return the tensors in `body`. Raises InvalidRequest naming tensor, value and rule."""
        if self._decode is None or has_slow_floats(body):
            return self._read_any(body)
        try:
            read = self._decode(body)
        except UNREADABLE:
            return self._read_any(body)
        inputs = read.inputs
        shapes = tuple([tensor.shape for tensor in inputs])
        learned = self._known.get(shapes) or self._learn(shapes)
        lists = [tensor.data for tensor in inputs]
        if list(map(len, lists)) != learned.counts:
            return self._read_any(body)
        parameters = read.parameters if self._keeps_head else None
        listed = Listed(ResponseHead(read.id or "", self._wanted(read.outputs), parameters), lists, shapes, learned)
        return listed if self._lists else listed.arrays(self._declared)

    def _read_any(self, body: bytes | memoryview) -> ArraysWithHead:
        request = read_request(body, "")
        arrays = bind(request.inputs, self._declared)
        return ArraysWithHead(arrays, ResponseHead(request.id, self._wanted(request.outputs), request.parameters))

    def _wanted(self, outputs: Sequence[ReadOutput | RequestedOutput] | None) -> list[str] | None:
        if not outputs:
            return None
        names = [output.name for output in outputs]
        for name in names:
            if name not in self._outputs:
                raise InvalidRequest(f"output {name!r}: not one of {', '.join(map(repr, self._outputs))}")
            if names.count(name) > 1:
                raise InvalidRequest(f"output {name!r}: is there twice, names must be unique")
        return names

    def _learn(self, shapes: Shapes) -> ShapeFacts:
        pairs = list(zip(self._declared, shapes, strict=True))
        counts = [element_count(tensor.name, shape) for tensor, shape in pairs]
        rows = check_bound({tensor.name: (tensor.datatype, shape) for tensor, shape in pairs}, self._declared)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
            self._tails.clear()
        tails = tuple([shape[1:] for shape in shapes])
        learned = self._known[shapes] = ShapeFacts(counts, rows, self._tails.setdefault(tails, tails))
        return learned


class BodyWriter:
    """Writes bodies for one model, which is served as `name` in `version` ("": none)."""

    def __init__(self, model: type[Model], name: str, version: str) -> None:
        self._declared = tuple(model.outputs)
        self._name = name
        self._version = version

    def __call__(self, arrays: Arrays, head: ResponseHead | None = None) -> bytes:
        """Return the response with the wanted outputs, in the declared order.

        Raises InvalidRequest for an output that has no JSON form: the caller must ask for binary data.
        """
        identity, wanted, _ = head or ("", None, None)
        outputs = [
            WrittenTensor(
                tensor.name,
                tensor.datatype,
                arrays[tensor.name].shape,
                data=write_elements(tensor.name, tensor.datatype, arrays[tensor.name]),
            )
            for tensor in self._declared
            if wanted is None or tensor.name in wanted
        ]
        return encode(WrittenResponse(self._name, outputs, self._version, identity))


def _decoder(declared: Sequence[Tensor], with_parameters: bool) -> Any:
    """Return the function that decodes bodies with exactly these inputs, in this order; None if one has no JSON form. Most models have no use for the
    `parameters`, which are skipped then."""
    if any(tensor.datatype not in ELEMENT_TYPES for tensor in declared):
        return None
    tensors = [
        msgspec.defstruct(
            "Input",
            [
                ("name", Literal[tensor.name]),
                ("shape", tuple[int, ...]),
                ("datatype", Literal[tensor.datatype]),
                ("data", GenericAlias(list, (ELEMENT_TYPES[tensor.datatype],))),
            ],
            gc=False,
        )
        for tensor in declared
    ]
    body = msgspec.defstruct(
        "Body",
        [
            ("inputs", GenericAlias(tuple, tuple(tensors))),
            ("id", str | None, None),
            ("outputs", list[ReadOutput] | None, None),
            *([("parameters", Parameters | None, None)] if with_parameters else []),
        ],
    )
    return msgspec.json.Decoder(body).decode


Array = numpy.ndarray[Any, Any]


def adjoined(parts: Sequence[Array]) -> Array | None:
    """Return `parts`, each of one row and all of one shape, as one array that is a view of their memory.

    None unless all lie in one mapping, which the array keeps open, at equal distances.
    """
    first = parts[0]
    memory = _mapping(first)
    if memory is None or len(first) != 1 or not first.flags.aligned:
        return None
    start = address = _address(first)
    step = _address(parts[1]) - start
    if step < first.nbytes or step % first.itemsize:
        return None
    for part in parts:
        if part.shape != first.shape or not part.flags.c_contiguous or _address(part) != address:
            return None
        if _mapping(part) is not memory:
            return None
        address += step
    whole = as_strided(first, (len(parts), *first.shape[1:]), (step, *first.strides[1:]), writeable=False)
    return whole.view()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _mapping(array: Array) -> mmap.mmap | None:
    """Return the mapping that `array` is a view of; None if it is not one of a mapping."""
    base: Any = array
    while isinstance(base, numpy.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else base
    return memory if isinstance(memory, mmap.mmap) else None


class Lease(numpy.ndarray[Any, Any]):
    """The bytes of a result in shared memory, not writable. It owns their place, which is released when the last array over it is gone."""

    _block: SharedBlock | None = None  # views and copies of this array have none

    def __del__(self) -> None:
        if self._block is not None:
            self._block.release()


def lease(block: SharedBlock) -> Lease:
    """Return the bytes of `block`, which has one owner, as an array that is this owner."""
    # Not a view of an ordinary array: the views of a view would refer to that array, and not to this one.
    leased = Lease(len(block.view), numpy.uint8, block.view)
    leased._block = block
    return leased


class Stacker:
    """Joins the entries of batches for one model."""

    def __init__(self, model: type[Model], buffers: Arrays | None = None) -> None:
        """`buffers` are arrays into which inputs are gathered (see input_buffers). Raises SettingsError for a `pad_value` that its datatype cannot
        hold."""
        self._declared = tuple(model.inputs)
        self._varying = {tensor.name: tensor for tensor in model.inputs if tensor.varying != GROUP}
        self._pads = {tensor.name: _pad_value(model, tensor) for tensor in model.inputs if tensor.varying == PAD}
        self._buffers = buffers or {}
        self._sizes = Sizes(model)
        self._owns = model.owns_inputs
        self._batched = is_batched(model)

    def __call__(self, entries: Sequence[Arrays | Listed]) -> Arrays:
        """Return the arrays for `predict`. If one entry is the whole batch, its arrays are not copied."""
        listed = [entry for entry in entries if isinstance(entry, Listed)]
        batch = joined(listed, self._declared) if len(listed) == len(entries) else None
        if batch is None:
            return self._join(
                [entry.arrays(self._declared) if isinstance(entry, Listed) else entry for entry in entries]
            )
        for array in batch.values():
            array.flags.writeable = self._owns
        return batch

    def _join(self, entries: Sequence[Arrays]) -> Arrays:
        if not self._batched:
            (entry,) = entries
            return {name: self._whole([array]) for name, array in entry.items()}
        entries = self._filled_up(entries)
        batch: Arrays = {}
        for name in entries[0]:
            parts = [entry[name] for entry in entries]
            tensor = self._varying.get(name)
            if tensor is None:
                batch[name] = self._gathered(name, parts)
                continue
            if tensor.varying == PAD:
                batch[name] = self._padded(parts, tensor)
            else:
                batch[name] = self._whole(list(map(_flat, parts)))
            batch[tensor.lengths_name] = _lengths(parts, tensor)
        return batch

    def _filled_up(self, entries: Sequence[Arrays]) -> Sequence[Arrays]:
        """Return `entries`, with one more that fills them up to an allowed batch size, if necessary."""
        if not self._sizes:
            return entries
        rows = sum(map(rows_of, entries))
        more = self._sizes.filled(rows) - rows
        if not more:
            return entries
        last = {name: numpy.repeat(array[-1:], more, axis=0) for name, array in entries[-1].items()}
        return [*entries, last]

    def _gathered(self, name: str, parts: list[Array]) -> Array:
        rows = sum(map(len, parts))
        into = self._buffers.get(name)
        if into is None or into.shape[1:] != parts[0].shape[1:] or len(into) < rows:
            return self._whole(parts)
        return numpy.concatenate(parts, out=into[:rows])

    def _whole(self, parts: list[Array]) -> Array:
        if len(parts) > 1:
            adjoining = None if self._owns else adjoined(parts)
            whole = numpy.concatenate(parts) if adjoining is None else adjoining
        else:
            whole = parts[0].copy() if self._owns else parts[0].view()
        if not self._owns:
            whole.flags.writeable = False
        return whole

    def _padded(self, parts: list[Array], tensor: Tensor) -> Array:
        rows = sum(map(len, parts))
        shapes = [part.shape[1:] for part in parts]
        longest = tuple([max(lengths) for lengths in zip(*shapes, strict=True)])
        into = self._buffers.get(tensor.name)
        if into is None or len(into) < rows or any(map(operator.gt, longest, into.shape[1:])):
            if shapes.count(longest) == len(shapes):
                return self._whole(parts)
            into = numpy.empty((rows, *longest), parts[0].dtype)
        padded = into[:rows]
        padded[...] = self._pads[tensor.name]
        start = 0
        for part in parts:
            stop = start + len(part)
            padded[start:stop, *map(slice, part.shape[1:])] = part
            start = stop
        if tensor.name not in self._buffers:
            padded.flags.writeable = self._owns
        return padded


def _flat(part: Array) -> Array:
    return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])


def _lengths(parts: list[Array], tensor: Tensor) -> Array:
    """Return the lengths of each row of the batch in the dimensions that vary."""
    lengths = numpy.array([[part.shape[axis] for axis in tensor.variable] for part in parts], numpy.int64)
    each = numpy.repeat(lengths, [len(part) for part in parts], axis=0)
    return each[:, 0] if len(tensor.variable) == 1 else each


def _pad_value(model: type[Model], tensor: Tensor) -> Any:
    value, dtype = tensor.pad_value, DTYPES[tensor.datatype]
    if tensor.datatype == "BYTES":
        return value or b""
    if tensor.datatype == "BF16":
        return to_bits(numpy.array(value, numpy.float32))
    try:
        with numpy.errstate(over="raise"):
            return numpy.array(value, dtype)
    except (OverflowError, FloatingPointError, ValueError) as error:
        raise SettingsError(
            f"{model.__name__}: tensor {tensor.name!r} has pad_value={value!r}, which is not a {tensor.datatype} ({error})"
        ) from None


class Splitter:
    """Divides the responses of one model."""

    def __init__(self, model: type[Model]) -> None:
        inputs = {tensor.name: tensor for tensor in model.inputs}
        self._batched = is_batched(model)
        self._sizes = Sizes(model)
        self._sources = {tensor.name: (tensor, inputs[tensor.like]) for tensor in model.outputs if tensor.like}
        self._returned = [self._as_returned(tensor) for tensor in model.outputs]

    def __call__(self, returned: Any, entries: Sequence[Any]) -> list[Arrays]:
        """Return the response to each of `entries`: views of what `predict` returned, in the order declared.

        Raises ModelError, naming the tensor, for anything but the tensors declared, with as many rows as the batch had.
        """
        arrays = read_arrays(returned, self._returned, wrong_tensors)
        if not self._batched:
            return [arrays]
        counts = [entry.rows if type(entry) is Listed else rows_of(entry) for entry in entries]
        filled = self._sizes.filled(sum(counts))
        columns = [self._column(name, array, entries, counts, filled) for name, array in arrays.items()]
        return [dict(zip(arrays, parts, strict=True)) for parts in zip(*columns, strict=True)]

    def _as_returned(self, tensor: Tensor) -> Tensor:
        _, source = self._sources.get(tensor.name, (tensor, None))
        if source is None or source.varying != RAGGED:
            return tensor
        return Tensor(tensor.name, tensor.datatype, (-1, *tensor.shape[2:]))

    def _column(self, name: str, array: Array, entries: Sequence[Any], counts: list[int], filled: int) -> list[Array]:
        if name not in self._sources:
            return _rows(name, array, counts, filled)
        tensor, source = self._sources[name]
        if any(source.name not in entry for entry in entries):
            raise wrong_tensors(f"tensor {name!r} is like {source.name!r}, which preprocess has taken away")
        given = [entry[source.name] for entry in entries]
        if source.varying == RAGGED:
            return _ragged(name, array, given, filled - sum(counts))
        parts = _rows(name, array, counts, filled)
        return [_cut(tensor, part, like, source) for part, like in zip(parts, given, strict=True)]


def wrong_tensors(text: str) -> ModelError:
    """Return the error of a model that returned other tensors than it declares."""
    return ModelError(f"predict returned wrong tensors: {text}")


def _rows(name: str, array: Array, counts: list[int], filled: int) -> list[Array]:
    if len(array) != filled:
        raise ModelError(f"predict returned {len(array)} rows for a batch of {filled} (tensor {name!r})")
    if len(counts) == 1 and counts[0] == filled:
        return [array]
    return [array[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


def _cut(tensor: Tensor, part: Array, like: Array, source: Tensor) -> Array:
    """Return the part of a padded output that has the true lengths of its input `like`."""
    index = [slice(None)] * part.ndim
    for axis, source_axis in zip(tensor.variable, source.variable, strict=True):
        length = like.shape[source_axis]
        if part.shape[axis] < length:
            raise wrong_tensors(
                f"tensor {tensor.name!r}: has shape {list(part.shape)}, must be as long as {source.name!r} {list(like.shape)}"
            )
        index[axis] = slice(length)
    return part[tuple(index)]


def _ragged(name: str, array: Array, given: list[Array], more: int) -> list[Array]:
    """Divide values that come one after the other. Those of the last `more` rows only filled the batch up."""
    sizes = [like.shape[0] * like.shape[1] for like in given]
    due = sum(sizes) + more * given[-1].shape[1]
    if len(array) != due:
        raise ModelError(f"predict returned {len(array)} values for a batch of {due} (tensor {name!r})")
    parts = [array[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [part.reshape(*like.shape[:2], *array.shape[1:]) for part, like in zip(parts, given, strict=True)]


Open = Callable[[int], memoryview | None]


def allocator(open_place: Open) -> Callable[[tuple[int, ...], numpy.dtype[Any]], Any]:
    """Return the function with which `Model.output` makes arrays. `open_place` returns shared memory of a size in bytes, or None."""

    def allocate(shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Any:
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LARGE_BYTES or dtype.hasobject:
            return numpy.empty(shape, dtype)
        view = open_place(size_bytes)
        return numpy.empty(shape, dtype) if view is None else numpy.frombuffer(view, dtype).reshape(shape)

    return allocate


def input_buffers(model: Model, max_batch_size: int) -> Arrays:
    """Return the arrays in which the model wants its inputs.

    Raises SettingsError for an array that belongs to no input, has another dtype, too few rows, or other lengths than declared.
    """
    kind = type(model)
    if not overrides(kind, "input_buffers"):
        return {}
    rows = Sizes(kind).filled(max_batch_size)
    given: Mapping[str, Any] = model.input_buffers(rows)
    buffers: Arrays = {}
    for name, value in given.items():
        tensor = next((tensor for tensor in kind.inputs if tensor.name == name), None)
        if tensor is None:
            raise SettingsError(f"{kind.__name__}.input_buffers: {name!r} is no input")
        array = numpy.asarray(value)
        due = DTYPES[tensor.datatype]
        if array.dtype != due:
            raise SettingsError(f"{kind.__name__}.input_buffers: {name!r} is of {array.dtype}, must be of {due}")
        fits = array.ndim == len(tensor.shape) and array.flags.writeable and len(array) >= rows
        if not fits or any(rule not in (-1, has) for rule, has in zip(tensor.shape[1:], array.shape[1:], strict=True)):
            must = f"writable and of shape {[rows, *tensor.shape[1:]]} (or with more rows)"
            raise SettingsError(
                f"{kind.__name__}.input_buffers: {name!r} has shape {list(array.shape)}, must be {must}"
            )
        buffers[name] = array
    return buffers


def readers(model: Model) -> dict[str, Callable[[Any], Any]]:
    """Return how an entry is read from each content type."""

    def arrays(value: Any) -> Any:
        if not model.keeps_head or not isinstance(value, dict):
            return to_arrays(value, model.inputs)
        bare, head = take_head(value)
        checked = to_arrays(bare, model.inputs)
        return checked if head is None else ArraysWithHead(checked, head)

    def arrays_in(content_type: str) -> Callable[[Any], Any]:
        decode = DECODE[content_type]
        return lambda payload: arrays(decode(payload))

    readers: dict[str, Callable[[Any], Any]] = {
        OBJECT: arrays,
        JSON: arrays_in(JSON),
        MSGPACK: arrays_in(MSGPACK),
        KSERVE: BodyReader(type(model)),
        PACKED: Unpacker(partial(to_arrays, declared=model.inputs)),
    }
    is_joined = is_batched(type(model)) and not (model.separate or model.streaming)
    if not (is_joined and all(tensor.optional for tensor in model.inputs)):
        return readers
    return {content_type: partial(_with_rows, model, read) for content_type, read in readers.items()}


def _with_rows(model: Model, read: Callable[[Any], Any], payload: Any) -> Any:
    """Read an entry that is joined with others: without a tensor it would have no rows."""
    entry = read(payload)
    if type(entry) is not Listed and not entry:
        names = ", ".join(repr(tensor.name) for tensor in model.inputs)
        raise InvalidRequest(f"tensors: there are none, must be at least one of {names}")
    return entry


def writers(kind: type[Model], label: str) -> dict[str, Callable[..., bytes]]:
    """Return how an entry's response is written for each content type; for KSERVE with the entry's head. `label` is the name of the service, and
    after a slash its version, if it has one."""
    json, msgpack = ENCODE[JSON], ENCODE[MSGPACK]
    name, version = parts_of(label)
    return {
        JSON: lambda arrays: json(to_text(arrays, kind.outputs)),
        MSGPACK: lambda arrays: msgpack(to_plain(arrays, kind.outputs)),
        KSERVE: BodyWriter(kind, name, version),
        PACKED: lambda arrays: pack({tensor.name: arrays[tensor.name] for tensor in kind.outputs}),
    }


def heads_of(items: list[Any]) -> list[Any]:
    """Return what the writer for KSERVE must know of each entry besides its response."""
    return list(map(head_of, items))


def part_of(model: Model) -> Callable[[Any], Any]:
    """Return the function that checks one response of a streaming model against the declared tensors. It raises ModelError."""
    return lambda response: to_arrays(response, model.outputs, wrong_tensors)


Judge = Callable[[Any, list[Any]], list[Any]]


def separated(model: Model, judge: Judge) -> tuple[Callable[[list[Any]], Any], Judge]:
    """Return `call` and `judge` (see TogetherStep) for a model whose `predict` gets the requests one by one (Model.separate). `judge` makes a list of
    what it returned."""
    declared, check, batched = tuple(model.inputs), part_of(model), is_batched(type(model))

    def checked(response: Any, entry: Any) -> Any:
        if isinstance(response, WeirError):
            return response
        try:
            arrays = check(response)
        except ModelError as error:
            return error
        rows = entry.rows if type(entry) is Listed else rows_of(entry)
        if batched and rows_of(arrays) != rows:
            return wrong_tensors(f"{rows_of(arrays)} rows for a request of {rows}")
        return arrays

    def call(entries: list[Any]) -> Any:
        return model.predict([entry.arrays(declared) if type(entry) is Listed else entry for entry in entries])

    return call, lambda returned, entries: list(map(checked, judge(returned, entries), entries))


def repeated(model: type[Model], example: Any, rows: int) -> list[Any]:
    """Return the example as many times as it takes for about `rows` rows, at least once."""
    arrays = to_arrays(example, model.inputs)
    return [arrays] * max(1, rows // rows_of(arrays)) if is_batched(model) else [arrays]
