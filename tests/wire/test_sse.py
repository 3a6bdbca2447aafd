"""Server-Sent Events: what is written is read again, and what the standard's examples say is understood."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.wire.sse import Event, EventParser, write_comment, write_event

NAMES = st.text().filter(lambda name: name and not set(name) & {"\n", "\r"} and name.isprintable())


def test_an_event_is_a_few_lines() -> None:
    assert write_event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert write_event(b"no", "error") == b"event: error\ndata: no\n\n"
    assert write_event(b"two\r\nlines\ror\nthree") == b"data: two\ndata: lines\ndata: or\ndata: three\n\n"
    assert write_comment("still\nthere") == b": still there\n\n"


def test_a_name_is_one_line() -> None:
    with pytest.raises(ValueError, match="must be one line"):
        write_event(b"", "a\nb")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.binary().filter(lambda data: b"\r" not in data), NAMES)), st.integers(1, 7))
def test_what_is_written_is_read_however_it_is_cut(events: list[tuple[bytes, str]], step: int) -> None:
    stream = b"".join(write_comment() + write_event(*event) for event in events)
    parser = EventParser()
    read = [event for start in range(0, len(stream), step) for event in parser.feed(stream[start : start + step])]
    assert read == [Event(data, name) for data, name in events]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_every_end_of_line_and_the_rules_of_the_standard(end: bytes, whole: bool) -> None:
    lines = [
        b"\xef\xbb\xbfdata: first", b"data:second", b"", b": a comment", b"", b"retry: 10", b"unknown", b"id: 7", b"event: add",
        b"data:  two spaces", b"", b"event: nothing in it", b"", b"data", b"", b"data: never finished",
    ]  # fmt: skip
    stream = end.join(lines)
    parser = EventParser()
    pieces = [stream] if whole else [stream[at : at + 1] for at in range(len(stream))]
    assert [event for piece in pieces for event in parser.feed(piece)] == [
        Event(b"first\nsecond"), Event(b" two spaces", "add", "7"), Event(b"", "message", "7"),
    ]  # fmt: skip


def test_an_event_may_not_grow_for_ever() -> None:
    parser = EventParser(max_event_bytes=100)
    parser.feed(b"data: " + b"x" * 80)
    with pytest.raises(ValueError, match="an event of more than 100 bytes"):
        parser.feed(b"x" * 30)
    parser = EventParser(max_event_bytes=100)
    with pytest.raises(ValueError, match="an event of more than 100 bytes"):
        parser.feed(b"data: 0123456789\n" * 20)
