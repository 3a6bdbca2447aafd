"""Reads undecoded JSON bodies of the Open Inference Protocol into a tensor model's arrays, and writes its answers as bodies.

Most requests have the model's inputs in their declared order, and flat data. For these msgspec checks names, datatypes and every element while it
decodes. All others are read by a slower function, which also says what is wrong.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from types import GenericAlias
from typing import Any, Literal, NamedTuple

import msgspec

from weir.errors import InvalidRequest
from weir.model import GROUP, Model, Tensor, is_batched, overrides
from weir.wire.inference import Parameters, RequestedOutput, ResponseHead, bind
from weir.wire.kserve_json import ReadOutput, WrittenResponse, WrittenTensor, encode, read_request
from weir.wire.tensors import ELEMENT_TYPES, Arrays, array_of, check_bound, element_count, write_elements
from weir.wire.values import UNREADABLE, has_slow_floats

MAX_REMEMBERED = 256  # combinations of shapes whose facts are kept

Shapes = tuple[tuple[int, ...], ...]


class ArraysWithHead(Arrays):
    """The arrays of a request, with its head."""

    __slots__ = ("head",)

    def __init__(self, arrays: Arrays, head: ResponseHead) -> None:
        super().__init__(arrays)
        self.head = head


class ShapeFacts(NamedTuple):
    """What follows from the shapes of a request's tensors: the number of elements of each, the number of rows, and the other lengths of each
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
    for place, (tensor, tail) in enumerate(zip(declared, tails, strict=True)):
        values = list(chain.from_iterable([entry.lists[place] for entry in entries]))
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
        counts = [element_count(tensor.name, shape, 1) for tensor, shape in pairs]
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
