"""zstd, gzip and deflate, both ways, never more than the limit."""

import os
import tracemalloc

import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType
from weir.protocols.response import CODINGS, MAX_MEMBERS, accepted_coding, coding_of, compress, decompress

both = subcases("coding", CODINGS)


@both
def test_what_was_compressed_comes_back(coding: str) -> None:
    for data in (b"", b"x", b"0" * 300_000, os.urandom(70_000)):
        assert decompress(compress(data, coding), coding, 300_000) == data
    assert decompress(compress(b"12", coding) + compress(b"34", coding), coding, 4) == b"1234"


@both
def test_the_limit_is_exact(coding: str) -> None:
    packed = compress(b"0" * 1000, coding)
    assert len(decompress(packed, coding, 1000)) == 1000
    with pytest.raises(TooLarge, match="at most 999 bytes"):
        decompress(packed, coding, 999)


@both
def test_a_bomb_costs_no_more_memory_than_the_limit_allows(coding: str) -> None:
    bomb = compress(b"0" * 60_000_000, coding)
    tracemalloc.start()
    with pytest.raises(TooLarge):
        decompress(bomb, coding, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@both
def test_what_is_cut_short_or_has_more_or_is_plain_is_refused(coding: str) -> None:
    packed = compress(os.urandom(100), coding)
    for body in (*[packed[:kept] for kept in (1, 5, 30, -1)], b"[1, 2]", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\0" * 100):
        with pytest.raises(InvalidRequest, match=f"Content-Encoding.*{coding}|{coding}.*Content-Encoding"):
            decompress(body, coding, 1000)
    with pytest.raises(InvalidRequest):
        decompress(compress(b"12", coding) + b"junk", coding, 1000)


@subcases(
    ("value", "coding"),
    [("", ""), ("identity", ""), ("gzip", "gzip"), (" GZIP ", "gzip"), ("x-gzip", "gzip"), ("zstd", "zstd"),
     ("deflate", "deflate")],
)  # fmt: skip
def test_content_encodings(value: str, coding: str) -> None:
    assert coding_of(value) == coding


@subcases("value", ["br", "compress", "gzip, gzip", "*"])
def test_an_unknown_content_encoding_is_refused_by_name(value: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="gzip"):
        coding_of(value)


@subcases(
    ("value", "coding"),
    [
        ("", ""), ("gzip", "gzip"), ("gzip, deflate, br", "gzip"), ("gzip, zstd", "zstd"), ("zstd;q=0.5, gzip", "gzip"),
        ("br", ""), ("*", "zstd"), ("*;q=0", ""), ("gzip;q=0, *", "zstd"), ("gzip;q=x", ""), (";;,,", ""), ("identity", ""),
        ("deflate", "deflate"),
    ],
)  # fmt: skip
def test_accept_encodings(value: str, coding: str) -> None:
    assert accepted_coding(value) == coding


@subcases(("value", "coding"), [("zstd", ""), ("zstd, deflate", "deflate"), ("*", "gzip"), ("gzip;q=0", "")])
def test_a_protocol_may_offer_fewer(value: str, coding: str) -> None:
    assert accepted_coding(value, ("gzip", "deflate")) == coding


@both
def test_empty_members_are_read_in_linear_time_and_not_without_end(coding: str) -> None:
    # Each was copied with all that follows it.
    empty = compress(b"", coding)
    assert decompress(empty * (MAX_MEMBERS - 1) + compress(b"12", coding), coding, 1000) == b"12"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_MEMBERS} "):
        decompress(empty * (MAX_MEMBERS + 1), coding, 1000)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_follows_a_member_is_not_copied_with_it(coding: str) -> None:
    body = compress(b"1", coding) + compress(os.urandom(4_000_000), coding)
    tracemalloc.start()
    assert len(decompress(body, coding, 1 << 30)) == 4_000_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000  # the answer, and its pieces
