"""Single requests to a server, beside the load: pages, and a first request to see whether it answers."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from weir.bench.targets.address import Address
from weir.bench.targets.answers import HttpAnswer
from weir.bench.targets.connection import Connection
from weir.bench.targets.dialling import Dialler, reason_of
from weir.errors import SettingsError

USER_AGENT = "weir-bench"


def request_bytes(method: str, address: Address, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return a request as it goes over the wire; `headers` win over ours."""
    said = {name.lower() for name in headers}
    lines = [f"{method} {address.path} HTTP/1.1"]
    if "host" not in said:
        lines.append(f"Host: {address.authority}")
    if "user-agent" not in said:
        lines.append(f"User-Agent: {USER_AGENT}")
    if method == "POST":
        lines.append(f"Content-Length: {len(body)}")
        if "content-type" not in said:
            lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _Sole:
    """The owner of a connection for one request."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()

    def answered(self, connection: Connection, index: int, answer: HttpAnswer) -> None:
        connection.close()
        self.answer.set_result(answer)

    def broken(self, connection: Connection, index: int, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(OSError(why))


async def fetch(dialler: Dialler, data: bytes, patience: float) -> HttpAnswer:
    """Return the answer to the request `data`. Raises SettingsError if there is none within `patience` seconds."""
    url, sole = dialler.address.url, _Sole()

    def make(sock: socket.socket) -> Connection:
        return Connection(sole, sock, direct=False, bodies=True)

    connection = None
    try:
        async with asyncio.timeout(patience):
            connection = await dialler.dial(make)
            connection.send(0, data)
            return await sole.answer
    except TimeoutError as error:
        raise SettingsError(f"{url}: no answer within {patience:g} s") from error
    except OSError as error:
        raise SettingsError(f"{url}: {reason_of(error)}") from error
    finally:
        if connection is not None:
            connection.close()


async def fetch_json(dialler: Dialler, path: str, patience: float) -> Any:
    """Return the JSON document at `path` of the server, or None if there is none."""
    data = request_bytes("GET", dialler.address.at(path), {})
    answer = await fetch(dialler, data, patience)
    try:
        return msgspec.json.decode(answer.body) if answer.status == 200 else None
    except msgspec.DecodeError:
        return None
