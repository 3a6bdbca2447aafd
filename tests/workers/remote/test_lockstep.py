"""What a worker says of a batch, however odd, is one output or error for each entry."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import ModelError, UnsupportedMediaType, ValidationFailed, WeirError
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, Batch, EventKind
from weir.wire.lockstep import LockstepReply
from weir.workers.remote.lockstep import LockstepBatch

FORMS = (JSON, MSGPACK, OCTETS, OBJECT, "image/png")


def output(answer: bytes, sent: str = JSON, wanted: str = JSON, *, failed: bool = False) -> Any:
    events = LockstepBatch(Batch(1, [b"1"], sent, wanted), 0).events(
        LockstepReply([answer], frozenset({0} if failed else ())), 0.5
    )
    assert events.final
    assert events.timing is not None
    assert events.timing.predict == 0.5
    (only,) = events.outputs
    assert events.kinds == ([EventKind.ERROR] if isinstance(only, WeirError) else None)
    return only


def test_what_the_other_form_cannot_say_is_the_workers_fault() -> None:
    assert isinstance(output(b"1" + b"0" * 40, JSON, MSGPACK), ModelError)
    assert isinstance(output(b"\xc1", MSGPACK, JSON), ModelError)


def test_a_form_that_the_answer_cannot_be_turned_into() -> None:
    assert isinstance(output(b"1", JSON, "image/png"), UnsupportedMediaType)


@pytest.mark.parametrize("sent", [OCTETS, "image/png", OBJECT])
def test_what_is_neither_json_nor_msgpack_is_passed_on(sent: str) -> None:
    assert output(b"\xff{", sent, JSON) == b"\xff{"


@pytest.mark.parametrize(
    "said",
    [
        b'"why"', b"why", b"[1]", b"{}", b'{"error": 1}', b'{"error": {"type": [], "message": "x"}}', b'{"error": {"type": {}}}',
        b'{"error": {"type": "SettingsError", "message": "x"}}', b'{"error": {"type": "ModelError", "message": 7}}', b"\xff",
        b'{"error": {"type": "ModelError", "message": "x"}, "more": 1}', b"",
    ],
)  # fmt: skip
def test_whatever_a_worker_says_of_an_item_it_refuses(said: bytes) -> None:
    assert isinstance(output(said, failed=True), ValidationFailed)


def test_an_error_may_say_what_it_is() -> None:
    said = msgspec.json.encode({"error": {"type": "ModelError", "message": "no", "details": [1]}})
    for sent in (JSON, OCTETS, MSGPACK):
        error = output(said, sent, failed=True)
        assert type(error) is ModelError
        assert (error.message, error.details) == ("no", [1])


@given(st.binary(max_size=50), st.sampled_from(FORMS), st.sampled_from(FORMS), st.booleans())
def test_any_bytes_have_an_output(answer: bytes, sent: str, wanted: str, failed: bool) -> None:
    assert isinstance(output(answer, sent, wanted, failed=failed), WeirError) >= failed
