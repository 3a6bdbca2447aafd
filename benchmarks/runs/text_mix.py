"""`text_mix PORT ZMQ_PORT ZMQ_PORT_OUT FIRST COUNT`: so many requests for vectors, of every kind of caller, no two texts alike.

Callers of /v1/embeddings, of /encode and over ZeroMQ, of which the latter two call themselves something new again and again; requests that
must be refused, each in another way; callers who leave before their answer. Prints how often each kind was answered, as JSON.
"""

import http.client
import json
import random
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from benchmarks.text_load import MODEL
from weir.bench.vectors import WORDS
from weir.client import EmbeddingClient
from weir.embedding.bert_as_service.client import BertTransport

# How many of a hundred requests are of each kind, and how many callers of it there are.
SHARES = {"openai": (40, 4), "encode": (20, 2), "zeromq": (20, 1), "refused": (15, 1), "left": (5, 1)}
SAME_NAME = {"encode": 4, "zeromq": 100}  # requests before a caller takes another name
AHEAD = 32  # requests that a caller over ZeroMQ has under way
LONGEST = 24  # words


class Where(NamedTuple):
    """The ports of the server."""

    port: int
    zmq_port: int
    zmq_port_out: int


def text(number: int) -> str:
    """Return text `number`: no other is like it."""
    chance = random.Random(number)
    return " ".join([*chance.choices(WORDS, k=chance.randint(1, LONGEST)), str(number)])


def openai(where: Where, numbers: range) -> int:
    """Ask /v1/embeddings over one connection."""
    bodies = ({"input": text(number), "model": MODEL} for number in numbers)
    return _all_answered(where, "/v1/embeddings", ((json.dumps(body), {}) for body in bodies), 200, 200)


def encode(where: Where, numbers: range) -> int:
    """Ask /encode over one connection, by ever new names."""
    asked = (
        (
            json.dumps({"id": number, "texts": [text(number)]}),
            {"X-Client-Id": f"encode-{number // SAME_NAME['encode']}"},
        )
        for number in numbers
    )
    return _all_answered(where, "/encode", asked, 200, 200)


def refused(where: Where, numbers: range) -> int:
    """Ask /v1/embeddings for what there is not."""
    return _all_answered(where, "/v1/embeddings", ((_wrong(number), {}) for number in numbers), 400, 499)


def _wrong(number: int) -> str:
    kinds: list[Callable[[], str]] = [
        lambda: json.dumps({"input": text(number), "model": f"unknown-{number}"}),
        lambda: json.dumps({"input": ["", text(number)], "model": MODEL}),
        lambda: json.dumps({"input": [number + 0.5], "model": MODEL}),
        lambda: json.dumps({"input": text(number), "model": MODEL, "dimensions": 1_000_000}),
        lambda: json.dumps({"input": text(number), "model": MODEL, "encoding_format": f"base{number}"}),
        lambda: '{"input": "' + text(number),
    ]
    return kinds[number % len(kinds)]()


def _all_answered(where: Where, path: str, asked: Iterator[tuple[str, dict[str, str]]], least: int, most: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
    done = 0
    for body, headers in asked:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        said = answer.read()
        if not least <= answer.status <= most:
            raise RuntimeError(f"{path} {body[:200]}: {answer.status} {said[:200]!r}")
        done += 1
    connection.close()
    return done


def zeromq(where: Where, numbers: range) -> int:
    """Ask over ZeroMQ, by ever new names."""
    done = 0
    for first in range(numbers.start, numbers.stop, SAME_NAME["zeromq"]):
        some = range(first, min(first + SAME_NAME["zeromq"], numbers.stop))
        transport = BertTransport("127.0.0.1", where.zmq_port, where.zmq_port_out)
        with EmbeddingClient(ignore_all_checks=True, transport=transport) as client:
            done += sum(1 for _ in client.encode_async(([text(number)] for number in some), ahead=AHEAD))
    return done


def left(where: Where, numbers: range) -> int:
    """Ask /encode, each time over a new connection, and leave."""
    for number in numbers:
        body = json.dumps({"id": number, "texts": [text(number)]}).encode()
        head = (
            f"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", where.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
    return len(numbers)


KINDS: dict[str, Callable[[Where, range], int]] = {
    "openai": openai, "encode": encode, "zeromq": zeromq, "refused": refused, "left": left,
}  # fmt: skip


def shared(first: int, count: int) -> Iterator[tuple[str, range]]:
    """Yield the numbers of the texts of each caller, with its kind."""
    for kind, (share, callers) in SHARES.items():
        whole = count * share // 100
        for caller in range(callers):
            begin, end = (first + whole * place // callers for place in (caller, caller + 1))
            yield kind, range(begin, end)
        first += whole


def main() -> None:
    """Do what is asked."""
    *ports, first, count = map(int, sys.argv[1:])
    where = Where(*ports)
    callers = list(shared(first, count))
    with ThreadPoolExecutor(len(callers)) as pool:
        asking = [(kind, pool.submit(KINDS[kind], where, numbers)) for kind, numbers in callers]
        done = dict.fromkeys(KINDS, 0)
        for kind, each in asking:
            done[kind] += each.result()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
