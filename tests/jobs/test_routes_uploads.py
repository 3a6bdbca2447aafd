"""Uploads: forms that arrive in any pieces, and forms that are wrong."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, TooLarge, UnsupportedMediaType, WeirError
from weir.jobs.routes import PIECE, Download, Upload
from weir.jobs.store import Disk
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account

TYPE = "multipart/form-data; boundary=b"


def form(*parts: tuple[str, bytes]) -> bytes:
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (head.encode(), text) for head, text in parts
    )
    return body + b"--b--\r\n"


FILE = ('name="file"; filename="../../etc/in.jsonl"', b"one\r\n--two\r\n" * 50)
PURPOSE = ('name="purpose"', b"batch")


def read(
    tmp_path: Path, body: bytes, size: int = 7, most: int = 10_000, kind: str = TYPE, reserved: list[int] | None = None
) -> Upload:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def reserve(size: int) -> None:
        if reserved is not None:
            reserved.append(size)

    async def main() -> Upload:
        upload = Upload(kind, tmp_path / "file", most, reserve, Disk())
        await upload.read(chunks(), 60.0)
        return upload

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_form_in_pieces_of_any_size(tmp_path: Path, size: int) -> None:
    upload = read(tmp_path, form(PURPOSE, FILE), size)
    assert (upload.filename, upload.fields, upload.size) == ("in.jsonl", {"purpose": "batch"}, len(FILE[1]))
    assert (tmp_path / "file").read_bytes() == FILE[1]


@subcases(
    ("body", "kind", "error"),
    [
        (form(PURPOSE), InvalidRequest, "file: is missing"),
        (form(FILE, FILE), InvalidRequest, "file: was sent twice"),
        (form(FILE)[:-9], InvalidRequest, "body: ends before its last boundary"),
        (b"nothing of the kind", InvalidRequest, "body: is not a form"),
        (form(('name="purpose"', b"x" * 2000)), InvalidRequest, "purpose: must have at most 1024 bytes"),
        (form(*[(f'name="f{number}"', b"x") for number in range(20)]), InvalidRequest, "more than 16 fields"),
        (form(('name="file"; filename="f"', b"x" * 20_000)), TooLarge, "must have at most 10000 bytes"),
        (form(*[PURPOSE] * 1500), TooLarge, "at most 65536 bytes beside a file of 10000"),
    ],
)
def test_wrong_forms(tmp_path: Path, body: bytes, kind: type[WeirError], error: str) -> None:
    with pytest.raises(kind, match=error):
        read(tmp_path, body)


def test_room_is_kept_for_what_has_arrived(tmp_path: Path) -> None:
    reserved = list[int]()
    read(tmp_path, form(('name="file"; filename="f"', b"x" * 1_000_000)), 100_000, 2_000_000, reserved=reserved)
    assert (len(reserved), sum(reserved)) == (4, 1_000_000)
    assert (tmp_path / "file").read_bytes() == b"x" * 1_000_000
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0


async def test_what_has_come_is_charged_until_it_is_written(tmp_path: Path) -> None:
    claim, seen, body = (
        Account(HttpSettings()).claim(),
        list[int](),
        form(('name="file"; filename="f"', bytes(2 * PIECE))),
    )
    CLAIM.set(claim)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), PIECE // 4):
            seen.append(claim.held_bytes)
            claim.take(len(chunk := body[start : start + PIECE // 4]))  # as whoever receives it does
            yield chunk

    async def reserve(size: int) -> None:
        """Have room."""

    await Upload(TYPE, tmp_path / "file", 10 * PIECE, reserve, Disk()).read(chunks(), 60.0)
    assert (seen[:2], max(seen)) == ([0, PIECE // 4], PIECE)  # a client that stalls holds no more than it has sent
    assert seen[5] == 0


@subcases("kind", ["application/json", "multipart/form-data", ""])
def test_other_types_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="must be multipart/form-data with a boundary"):
        read(tmp_path, b"", kind=kind)


def test_a_download_of_a_file_that_is_deleted_meanwhile_ends(tmp_path: Path) -> None:
    path, sent = tmp_path / "file", list[int]()
    path.write_bytes(b"x" * (2 * PIECE + 5))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))
        if len(sent) == gone_after:
            path.unlink()

    gone_after, get = 0, {"type": "http", "method": "GET"}
    asyncio.run(Download(path, 2 * PIECE + 5)(get, receive, send))
    assert sent == [0, PIECE, PIECE, 5]
    gone_after = len(sent) + 2
    asyncio.run(Download(path, 2 * PIECE + 5)(get, receive, send))
    assert sent[4:] == [0, PIECE]
    asyncio.run(Download(path, 5)({"type": "http", "method": "HEAD"}, receive, send))
    assert sent[-2:] == [0, 0]


async def test_an_upload_that_trickles_is_given_up(tmp_path: Path) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield form(FILE)[:100]
        for _ in range(1000):
            await asyncio.sleep(0.01)
            yield b"x"

    async def room(size: int) -> None:
        pass

    with pytest.raises(TimeoutError):
        await Upload(TYPE, tmp_path / "file", 10_000, room, Disk()).read(trickle(), 0.2)
