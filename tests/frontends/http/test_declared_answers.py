"""An answer is written as its declared type says, in every format and on every way out, and so is it described."""

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import httpx
import msgspec
import numpy
import pydantic
import pytest
from tests.frontends.http.servers import SERVERS, Running, Serve, running
from tests.rings import subcases

import weir
from weir.catalog.chains import Chain
from weir.catalog.registry import Registry
from weir.messages import JSON, MSGPACK
from weir.model import Last, Model
from weir.protocols import HttpSettings
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
DECLARED = [case for case in CASES if CASES[case].declared is not None]  # a chain declares nothing


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


class Unchanged(Service):
    """Makes the answer of a case once more in a hook."""

    make: Callable[[], Any]

    async def after_batch(self, results: list[Any]) -> list[Any]:
        return [self.make() for _ in results]


def services(number: int, case: str) -> list[Any]:
    """Return what answers a case: a model, a stream, a chain, and a model with a hook."""
    plain = Service(model_of(case), name=f"plain{number}", executor="inline")
    streamed = Service(model_of(case, streaming=True), name=f"streamed{number}", executor="inline")
    hooked = Unchanged(model_of(case), name=f"hooked{number}", executor="inline")
    hooked.make = CASES[case].make
    return [plain, streamed, hooked, Chain([plain.name], name=f"chain{number}")]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """All cases, through each frontend in turn."""
    every = [service for number, case in enumerate(CASES) for service in services(number, case)]
    with running(request.param, Registry(every), HttpSettings(port=0)) as server:
        yield server


def read_all(server: Running, path: str, body: Any = 1) -> tuple[Any, Any]:
    """Return the body of an answer as it is written in JSON and in msgpack."""
    plain, packed = (
        server.client.post(path, json=body, headers={"accept": accept}).raise_for_status().content
        for accept in (JSON, MSGPACK)
    )
    return json.loads(plain), msgspec.msgpack.decode(packed)


@subcases(("number", "case"), enumerate(CASES))
def test_every_way_out_is_written_by_the_declared_type(server: Running, number: int, case: str) -> None:
    declared, _, as_json, as_msgpack = CASES[case]
    assert read_all(server, f"/infer/plain{number}") == (as_json, as_msgpack)
    lists = read_all(server, f"/infer/plain{number}/batch", [1, 2])
    assert lists == ([{"output": as_json}] * 2, [{"output": as_msgpack}] * 2)
    tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": ["1"]}
    for path in (f"/v2/models/plain{number}/infer", f"/v2/models/streamed{number}/infer_stream"):
        answer = server.client.post(path, json={"inputs": [tensor]})
        bodies = [event.data for event in EventParser().feed(answer.content)] if "stream" in path else [answer.content]
        for body in bodies:
            assert json.loads(json.loads(body)["outputs"][0]["data"][0]) == as_json
    events = EventParser().feed(server.client.post(f"/infer/streamed{number}", json=1).content)
    assert [json.loads(event.data) for event in events] == [as_json] * 2
    if declared is None:
        assert read_all(server, f"/infer/chain{number}")[0] == as_json
    else:
        assert read_all(server, f"/infer/hooked{number}") == (as_json, as_msgpack)


def test_a_hook_whose_answer_is_not_as_declared_is_told(serve: Serve) -> None:
    class Wrong(Service):
        async def after_batch(self, results: list[Any]) -> list[Any]:
            return [3 for _ in results]

    server = serve(Wrong(model_of("a subclass"), name="hooked", executor="inline"))
    answer = server.client.post("/infer/hooked", json=1)
    assert answer.status_code == 500 and "not a valid Output" in answer.json()["error"]["message"]


@subcases("case", [case for case in DECLARED if case != "for JSON only"])
async def test_the_description_has_the_names_that_are_written(case: str) -> None:
    app: Any = weir.asgi(Service(model_of(case), name="plain", executor="inline"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir") as client:
        text = (await client.get("/openapi.json")).text

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value))
        if not isinstance(value, dict):
            return set()
        return set(value).union(*map(names, value.values())) - {"x"}

    assert all(f'"{name}"' in text for name in names(CASES[case].as_json))


async def test_a_caller_in_the_program_gets_the_object() -> None:
    async with Service(model_of("a subclass"), executor="inline") as service:
        assert isinstance(await service.infer(1), Public)
