"""Content types: what is read, and what is written unasked."""

import pytest
from tests.frontends.http.models import Add, Blob, Echo, Reader, Shout

from weir.errors import UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OCTETS
from weir.model import Model
from weir.protocols.content_negotiation import accept_of, content_type_of, read_types, weighted, write_types


@pytest.mark.parametrize(
    ("model", "batch", "types"),
    [
        (Echo, False, [JSON, MSGPACK, OCTETS]), (Echo, True, [JSON, MSGPACK]), (Add, False, [JSON, MSGPACK]),
        (Shout, False, [JSON, MSGPACK, OCTETS, "text/plain", "text/x-loud"]), (Shout, True, [JSON, MSGPACK]),
    ],
)  # fmt: skip
def test_what_a_model_reads(model: type[Model], batch: bool, types: list[str]) -> None:
    assert read_types(model, batch) == types


@pytest.mark.parametrize(
    ("model", "sent", "preferred"),
    [
        (Echo, JSON, JSON), (Echo, MSGPACK, MSGPACK), (Echo, OCTETS, JSON), (Blob, OCTETS, OCTETS),
        (Shout, "text/plain", "text/plain"), (Reader, "text/plain", JSON),
    ],
)  # fmt: skip
def test_the_preferred_type_of_answers(model: type[Model], sent: str, preferred: str) -> None:
    assert write_types(model, False, sent)[0] == preferred


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        ("application/vnd.api+json", JSON), ("text/json", JSON), ("TEXT/PLAIN;charset=x", "text/plain"),
        (" application/json ", JSON), ("application/x-msgpack", MSGPACK),
    ],
)  # fmt: skip
def test_content_types(value: str, meaning: str) -> None:
    assert content_type_of(value, Shout, False) == meaning


def test_a_models_own_type_comes_before_any_other_meaning() -> None:
    class Own(Echo):
        content_types = ("application/x-www-form-urlencoded", "application/geo+json")

    assert content_type_of("application/x-www-form-urlencoded", Own, False) == "application/x-www-form-urlencoded"
    assert content_type_of("application/geo+json", Own, False) == "application/geo+json"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", JSON), ("*/*", JSON), ("*/*;q=0.1", JSON), ("application/*;q=0.5, text/plain", "text/plain"),
        ("text/*", "text/plain"), ("application/json;q=0.2,application/msgpack;q=0.3", MSGPACK),
        ("application/json;version=2", JSON), ("application/json;q=0, application/*", MSGPACK), (",,;q=1,*/*", JSON),
        ("application/json;q=oops, application/msgpack", MSGPACK),
    ],
)  # fmt: skip
def test_preferences(value: str, wanted: str) -> None:
    assert accept_of(value, [JSON, MSGPACK, "text/plain"]) == wanted


@pytest.mark.parametrize("value", ["text/html", "image/*", "application/json;q=0", "*/*;q=0", "nonsense"])
def test_preferences_that_cannot_be_met(value: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="responses are written as"):
        accept_of(value, [JSON])


def test_weights() -> None:
    assert weighted("gzip;q=0.5, ZSTD ; q=1.0,br") == {"gzip": 0.5, "zstd": 1.0, "br": 1.0}


def test_of_many_preferences_the_first_are_read() -> None:
    assert list(weighted(",".join(["a"] * 63 + ["b", "c"]))) == ["a", "b"]


def test_a_multipart_type_keeps_its_boundary() -> None:
    class Form(Echo):
        content_types = ("multipart/form-data",)

    assert (
        content_type_of('Multipart/Form-Data; boundary="aB c"', Form, False) == 'multipart/form-data; boundary="aB c"'
    )
    assert content_type_of("multipart/form-data;", Form, False) == "multipart/form-data"
    assert write_types(Form, False, "multipart/form-data; boundary=x")[0] == JSON
