"""Models for the tests of HTTP."""

from email import message_from_bytes
from typing import Any

import msgspec
import numpy
import pydantic

from weir.errors import InvalidRequest, ValidationFailed
from weir.model import Example, Measure, Model, Tensor


class Square(Model):
    """Squares numbers."""

    examples = (Example(3, 9), Example(1.5, 2.25))

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Echo(Model):
    """Gives back what it gets."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Size(Model):
    """The length of each text or of bytes."""

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(item) for item in batch]


class Moody(Model):
    """Fails in every way that a model can."""

    def preprocess(self, item: Any) -> Any:
        if item == "invalid":
            raise InvalidRequest("this item is invalid")
        if item == "unprocessable":
            raise ValidationFailed("this item does not pass", details=[{"loc": ["x"], "msg": "no"}])
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        if "explode" in batch:
            raise KeyError("secret of the model")
        return batch


class Point(pydantic.BaseModel):
    """A point in the plane."""

    x: float
    y: float = 0.0


class Length(Model):
    """The length of a vector."""

    Input = Point
    Output = float
    examples = (Example({"x": 3.0, "y": 4.0}, 5.0),)

    def predict(self, batch: list[Point]) -> list[float]:
        return [(point.x**2 + point.y**2) ** 0.5 for point in batch]


class Node(msgspec.Struct):
    """A tree."""

    name: str
    children: list["Node"] = []


class Count(Model):
    """Counts the nodes of a tree."""

    Input = Node
    Output = int

    def predict(self, batch: list[Node]) -> list[int]:
        return [self._count(node) for node in batch]

    def _count(self, node: Node) -> int:
        return 1 + sum(map(self._count, node.children))


class Blob(Model):
    """Turns bytes round."""

    Output = bytes

    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [item[::-1] for item in batch]


class Shout(Model):
    """Reads and writes a content type of its own."""

    content_types = ("text/plain", "text/x-loud")

    def decode(self, body: bytes, content_type: str) -> str:
        return body.decode()

    def encode(self, value: str, content_type: str) -> bytes:
        return value.encode()

    def predict(self, batch: list[str]) -> list[str]:
        return [item.upper() for item in batch]


class Reader(Model):
    """Reads a content type of its own and answers in JSON."""

    content_types = ("text/plain",)

    def decode(self, body: bytes, content_type: str) -> str:
        return body.decode()

    def predict(self, batch: list[str]) -> list[int]:
        return [len(item) for item in batch]


class Upload(Model):
    """Reads the files of a form: each one's name and size."""

    content_types = ("multipart/form-data",)

    def decode(self, body: bytes, content_type: str) -> dict[str, int]:
        form = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body)
        return {
            str(part.get_filename()): len(part.get_payload(decode=True)) for part in form.walk() if part.get_filename()
        }

    def predict(self, batch: list[dict[str, int]]) -> list[dict[str, int]]:
        return batch


class Words(Model):
    """Items of different size, measured at the frontend."""

    def predict(self, batch: list[str]) -> list[int]:
        return [len(item) for item in batch]

    @classmethod
    def measure(cls, item: Any) -> Measure:
        return Measure(rows=len(item.split()), cost=float(len(item)), key=item[:1])


class Add(Model):
    """Adds two tensors."""

    inputs = (Tensor("a", "FP32", [-1, 2]), Tensor("b", "FP32", [-1, 2]))
    outputs = (Tensor("sum", "FP32", [-1, 2]),)
    examples = ({"a": [[1.0, 2.0]], "b": [[3.0, 4.0]]},)

    def predict(self, batch: dict[str, "numpy.ndarray[Any, Any]"]) -> dict[str, "numpy.ndarray[Any, Any]"]:
        return {"sum": batch["a"] + batch["b"]}


class Upper(Model):
    """Tensors of bytes."""

    inputs = (Tensor("text", "BYTES", [-1]),)
    outputs = (Tensor("text", "BYTES", [-1]),)

    def predict(self, batch: dict[str, "numpy.ndarray[Any, Any]"]) -> dict[str, "numpy.ndarray[Any, Any]"]:
        return {"text": numpy.array([b"\xff" if each == b"bad" else each.upper() for each in batch["text"]], object)}


MODELS: list[type[Model]] = [Add, Blob, Count, Echo, Length, Moody, Reader, Shout, Size, Square, Upload, Upper, Words]
