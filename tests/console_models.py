"""Models of all kinds of inputs, for the commands that a server prints."""

from typing import Any, Literal

import msgspec
import pydantic

import weir


class Point(pydantic.BaseModel):
    kind: Literal["point"]
    at: list[float]
    note: str | None = None


class Size(msgspec.Struct):
    width: int
    inner: "Size | None" = None


class Echo(weir.Model):
    def predict(self, batch: Any) -> Any:
        return batch


class Typed(Echo):
    Input = Point

    def postprocess(self, item: Any) -> Any:
        return item.kind


class Struct(Echo):
    Input = Size

    def postprocess(self, item: Any) -> Any:
        return item.width


class Arrays(Echo):
    inputs = (weir.Tensor("x", "FP32", [-1, 2, -1]), weir.Tensor("names", "BYTES", [-1]))
    outputs = inputs


class Large(Echo):
    inputs = outputs = (weir.Tensor("x", "FP32", [-1, 3, 224, 224]),)


class Words(weir.Model):
    streaming = True
    examples = ("it's here",)

    def predict(self, batch: Any) -> Any:
        for word in batch[0].split():
            yield {0: word}


class Upload(Echo):
    content_types = ("multipart/form-data",)

    def decode(self, body: Any, content_type: str = "") -> Any:
        return len(body)


class Picture(Upload):
    content_types = ("image/png",)


class Untyped(Echo):
    pass
