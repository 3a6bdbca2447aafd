"""Texts as tensors of the Open Inference Protocol, and their vectors."""

from typing import Any, NamedTuple

import numpy

from weir.embedding.calling import EmbeddingContext, check_client
from weir.embedding.texts import Encoded, Text
from weir.errors import InvalidRequest, brief
from weir.model import Tensor
from weir.serving.inference import integer_of
from weir.wire.inference import InferenceRequest, Parameters, TensorValue

INPUTS = (Tensor("input", "BYTES", (-1,)),)
VECTORS, TRUNCATED = "output", "truncated"

_TRUTH = {"true": True, "false": False}  # some clients write every parameter as text
_NO_TOKEN = -1  # fills a row of token ids up


class Asked(NamedTuple):
    """What a request asks for; see Encodes.encode."""

    texts: list[Text]
    truncate: bool | None
    dimensions: int | None
    prompt: str | None
    whole_words: bool
    client: str


def outputs(dimensions: int, *, of_tokens: bool) -> tuple[Tensor, ...]:
    """Return what answers have: vectors of so many numbers, `of_tokens` one for each token, and which texts were cut."""
    shape = (-1, -1, dimensions) if of_tokens else (-1, dimensions)
    return Tensor(VECTORS, "FP32", shape), Tensor(TRUNCATED, "BOOL", (-1,))


def read_request(request: InferenceRequest, site: EmbeddingContext, dimensions: int) -> Asked:
    """Return what `request` asks a model for whose vectors have so many `dimensions`. Raises InvalidRequest naming the tensor or the
    parameter, its value and the rule."""
    said = request.parameters
    tokenized = _flag(said, "is_tokenized")
    (name,) = (tensor.name for tensor in INPUTS)
    if len(request.inputs) != 1 or request.inputs[0].name != name:
        names = ", ".join(repr(value.name) for value in request.inputs) or "none"
        raise InvalidRequest(f"tensors {names}: must be {name!r} alone")
    value = request.inputs[0]
    site.check_count(len(value.array) if value.array.ndim else 1, f"tensor {name!r}")
    keep = said.get("dimensions")
    return Asked(
        _texts(value, tokenized), _flag(said, "truncate"),
        None if keep is None else integer_of("dimensions", keep, 1, dimensions),
        _text(said, "prompt"), bool(tokenized), check_client(_text(said, "client"), "parameter 'client'"),
    )  # fmt: skip


def arrays_of(encoded: Encoded) -> dict[str, Any]:
    """Return the outputs by name."""
    return {VECTORS: encoded.vectors, TRUNCATED: numpy.array(encoded.truncated, bool)}


def _texts(value: TensorValue, tokenized: bool | None) -> list[Text]:
    if value.datatype in ("INT32", "INT64"):
        return _token_ids(value, tokenized)
    if value.datatype != "BYTES":
        raise InvalidRequest(
            f"tensor {value.name!r}: has datatype {value.datatype!r}, must be BYTES (texts), INT32 or INT64 (token ids)"
        )
    shape = value.array.shape
    rows = value.array.tolist()
    if len(shape) == 2 and tokenized is not None:
        return [
            [_decoded(value, row, word) for word in _ended(value, row, words, b"")] for row, words in enumerate(rows)
        ]
    if tokenized:
        raise InvalidRequest(f"tensor {value.name!r}: has shape {list(shape)}, must be [texts, words] (is_tokenized)")
    if len(shape) == 2 and shape[1] == 2:
        return [(_decoded(value, row, first), _decoded(value, row, other)) for row, (first, other) in enumerate(rows)]
    if len(shape) != 1:
        raise InvalidRequest(
            f"tensor {value.name!r}: has shape {list(shape)}, must be [texts], [texts, 2] for pairs, or with the parameter "
            "is_tokenized [texts, words]"
        )
    return [_decoded(value, row, text) for row, text in enumerate(rows)]


def _token_ids(value: TensorValue, tokenized: bool | None) -> list[Text]:
    shape = value.array.shape
    if tokenized:
        raise InvalidRequest(f"tensor {value.name!r}: has token ids, must have words (is_tokenized)")
    if len(shape) != 2:
        raise InvalidRequest(f"tensor {value.name!r}: has shape {list(shape)}, must be [texts, tokens] for token ids")
    return [_ended(value, row, ids, _NO_TOKEN) for row, ids in enumerate(value.array.tolist())]


def _ended(value: TensorValue, row: int, elements: list[Any], filler: bytes | int) -> list[Any]:
    """Return a row without what fills it up."""
    count = len(elements)
    while count and elements[count - 1] == filler:
        count -= 1
    if not count:
        raise InvalidRequest(f"tensor {value.name!r}[{row}]: is empty, must have a word or a token id")
    return elements[:count]


def _decoded(value: TensorValue, row: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"tensor {value.name!r}[{row}]: must be a text in UTF-8 ({error.reason})") from None


def _flag(said: Parameters, name: str) -> bool | None:
    value = said.get(name)
    if isinstance(value, str):
        value = _TRUTH.get(value.lower(), value)
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be true or false")


def _text(said: Parameters, name: str) -> str | None:
    value = said.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be a text")
