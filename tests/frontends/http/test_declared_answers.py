"""An answer is written as its declared type says, in every format and on every way out, and so is it described."""

import dataclasses
import datetime
import json
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy
import pydantic
import pytest
from tests.frontends.http.servers import Running, Serve

from weir.catalog.chains import Chain
from weir.model import Last, Model
from weir.serving.service import Service
from weir.wire.sse import EventParser


class Public(pydantic.BaseModel):
    name: str


class Private(Public):
    password: str = "secret"


class PublicStruct(msgspec.Struct):
    name: str


class PrivateStruct(PublicStruct):
    password: str = "secret"


@dataclasses.dataclass
class PublicData:
    name: str


@dataclasses.dataclass
class PrivateData(PublicData):
    password: str = "secret"


@pydantic.dataclasses.dataclass
class Aliased:
    n_items: int = pydantic.Field(serialization_alias="nItems")


class Nested(pydantic.BaseModel):
    inner: Public
    all: list[Public]


class Rich(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    raw: bytes
    number: Any
    array: Any
    day: datetime.date
    secret: pydantic.SecretStr
    url: pydantic.HttpUrl
    counted: float

    @pydantic.field_serializer("counted")
    def in_percent(self, counted: float) -> str:
        """Say it in percent."""
        return f"{100 * counted:g} %"


class JsonOnly(pydantic.BaseModel):
    when: Annotated[int, pydantic.PlainSerializer(lambda when: f"at {when}", return_type=str, when_used="json")]
    raw: Annotated[bytes, pydantic.Field()] = b"text"


NAME = {"name": "a"}
RICH = Rich(
    raw=b"\xff\x00", number=numpy.float32(1.5), array=numpy.arange(3), day=datetime.date(2026, 1, 2), secret=pydantic.SecretStr("x"),
    url=pydantic.HttpUrl("http://a.b/c"), counted=0.5,
)  # fmt: skip
RICH_JSON = {
    "raw": "/wA=", "number": 1.5, "array": [0, 1, 2], "day": "2026-01-02", "secret": "**********", "url": "http://a.b/c", "counted": "50 %",
}  # fmt: skip


class Case(NamedTuple):
    """A declared type, an answer, and how it is written in JSON and in msgpack."""

    declared: Any
    make: Callable[[], Any]
    as_json: Any
    as_msgpack: Any


CASES: dict[str, Case] = {
    "a subclass": Case(Public, lambda: Private(name="a"), NAME, NAME),
    "a list of them": Case(list[Public], lambda: [Private(name="a")], [NAME], [NAME]),
    "nested": Case(Nested, lambda: Nested(inner=Private(name="a"), all=[Private(name="a")]), *[{"inner": NAME, "all": [NAME]}] * 2),
    "optional": Case(Public | None, lambda: Private(name="a"), NAME, NAME),
    "a subclass of a struct": Case(PublicStruct, lambda: PrivateStruct("a"), NAME, NAME),
    "a list of structs": Case(list[PublicStruct], lambda: [PrivateStruct("a")], [NAME], [NAME]),
    "a subclass of a dataclass": Case(PublicData, lambda: PrivateData("a"), NAME, NAME),
    "an alias of a dataclass": Case(Aliased, lambda: Aliased(3), *[{"nItems": 3}] * 2),
    "in a dict": Case(dict[str, Aliased], lambda: {"x": Aliased(3)}, *[{"x": {"nItems": 3}}] * 2),
    "in a list": Case(list[Aliased], lambda: [Aliased(3)], *[[{"nItems": 3}]] * 2),
    "annotated": Case(Annotated[Aliased, "x"], lambda: Aliased(3), *[{"nItems": 3}] * 2),
    "rich": Case(Rich, lambda: RICH, RICH_JSON, RICH_JSON | {"raw": b"\xff\x00"}),
    "undeclared": Case(None, lambda: RICH, RICH_JSON, RICH_JSON | {"raw": b"\xff\x00"}),
    "undeclared, inside": Case(None, lambda: [RICH], [RICH_JSON], [RICH_JSON | {"raw": b"\xff\x00"}]),
    "for JSON only": Case(
        JsonOnly, lambda: JsonOnly(when=3), {"when": "at 3", "raw": "text"}, {"when": 3, "raw": b"text"},  # as pydantic's own JSON is
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


def model_of(case: str, *, streaming: bool = False) -> type[Model]:
    """Return a model that answers a case."""
    declared, make, _, _ = CASES[case]

    def predict(self: Model, batch: list[Any]) -> list[Any]:
        return [make() for _ in batch]

    def stream(self: Model, batch: list[Any]) -> Any:
        yield {place: make() for place in range(len(batch))}
        yield {place: Last(make()) for place in range(len(batch))}

    attributes = {"Output": declared, "streaming": streaming, "predict": stream if streaming else predict}
    return type("Answers", (Model,), attributes)


def read_all(server: Running, path: str, body: Any, accept: str) -> Any:
    """Return the body of an answer."""
    answer = server.client.post(path, json=body, headers={"accept": accept})
    assert answer.status_code == 200, answer.text
    return json.loads(answer.content) if accept == "application/json" else msgspec.msgpack.decode(answer.content)


@every_case
def test_one_and_a_list_and_the_open_protocol_and_a_chain_and_a_stream(serve: Serve, case: str) -> None:
    _, _, as_json, as_msgpack = CASES[case]
    plain = Service(model_of(case), name="plain", executor="inline")
    streamed = Service(model_of(case, streaming=True), name="streamed", executor="inline")
    server = serve(plain, Chain(["plain"], name="chain"), streamed)
    for accept, written in (("application/json", as_json), ("application/msgpack", as_msgpack)):
        assert read_all(server, "/infer/plain", 1, accept) == written
        assert read_all(server, "/infer/plain/batch", [1, 2], accept) == [{"output": written}] * 2
    tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ["1"]}
    for path in ("/v2/models/plain/infer", "/v2/models/streamed/infer_stream"):
        answer = server.client.post(path, json={"inputs": [tensor]})
        bodies = [event.data for event in EventParser().feed(answer.content)] if "stream" in path else [answer.content]
        for body in bodies:
            assert json.loads(json.loads(body)["outputs"][0]["data"][0]) == as_json
    events = EventParser().feed(server.client.post("/infer/streamed", json=1).content)
    assert [json.loads(event.data) for event in events] == [as_json] * 2
    if CASES[case].declared is None:  # a chain declares nothing
        assert read_all(server, "/infer/chain", 1, "application/json") == as_json


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].declared is not None])
def test_what_a_hook_returns_is_written_by_the_declared_type_too(serve: Serve, case: str) -> None:
    _, make, as_json, as_msgpack = CASES[case]

    class Unchanged(Service):
        async def after_batch(self, results: list[Any]) -> list[Any]:
            return [make() for _ in results]

    server = serve(Unchanged(model_of(case), name="hooked", executor="inline"))
    assert read_all(server, "/infer/hooked", 1, "application/json") == as_json
    assert read_all(server, "/infer/hooked", 1, "application/msgpack") == as_msgpack


def test_a_hook_whose_answer_is_not_as_declared_is_told(serve: Serve) -> None:
    class Wrong(Service):
        async def after_batch(self, results: list[Any]) -> list[Any]:
            return [3 for _ in results]

    server = serve(Wrong(model_of("a subclass"), name="hooked", executor="inline"))
    answer = server.client.post("/infer/hooked", json=1)
    assert answer.status_code == 500 and "not a valid Output" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case].declared is not None and case != "for JSON only"]
)
def test_the_description_has_the_names_that_are_written(serve: Serve, case: str) -> None:
    _, _, as_json, _ = CASES[case]
    server = serve(Service(model_of(case), name="plain", executor="inline"))
    document = server.client.get("/openapi.json").json()
    text = json.dumps(document)

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value))
        if not isinstance(value, dict):
            return set()
        return set(value).union(*map(names, value.values())) - {"x"}

    assert all(f'"{name}"' in text for name in names(as_json))


async def test_a_caller_in_the_program_gets_the_object() -> None:
    async with Service(model_of("a subclass"), executor="inline") as service:
        assert isinstance(await service.infer(1), Public)
