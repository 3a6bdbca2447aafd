"""Does the cost of a parser grow faster than its body? `python -m tests.fuzz.growth [--seconds S] [--seed N]`

Bodies are made of one thing many times over, at random: values, keys, nesting, escapes, fields, members. Each goes to the
parsers of its format; one that takes too much CPU time or memory for each byte, or raises what is no WeirError, is shown, and
the exit code is 1. This has found that msgspec reads some floats a thousand times more slowly than others.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import track
from tests.text_server.hashing import HashingEncoder

from weir.errors import WeirError
from weir.frontends.http.fast.plan import HeadReader
from weir.messages import JSON, MSGPACK
from weir.model import Tensor
from weir.protocols import HttpSettings
from weir.protocols.response import weighted
from weir.text_server.bert_as_service.http import encode, read_document
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.http import HttpTexts
from weir.text_server.metrics import TextCounts
from weir.text_server.protocols import text_apis
from weir.text_server.texts import TextFacts, TextTask
from weir.wire import kserve_grpc, kserve_json, tensors, values, websocket
from weir.wire.kserve_json import read_generate

SIZES = (200, 3_000, 40_000, 300_000)  # bytes
MOST_MS = 150.0  # of CPU time for a megabyte, on a busy machine, and 50 beside
# The size of the body in memory, and 5 MB beside: a dict of one byte of msgpack takes 64, and its place.
MOST_TIMES = 160.0

DECLARED = (Tensor("x", "FP32", [-1, -1]), Tensor("s", "BYTES", [-1]))
ALL = TextFacts(tasks=tuple(TextTask))
SITE = EmbeddingContext({"hashing": HashingEncoder(facts=ALL)}, HttpSettings(), 100_000, TextCounts())
FORM = "application/x-www-form-urlencoded"
Parse = Callable[[bytes], Any]
ENDPOINTS = [each for api in text_apis(SITE) for each in api.texts]


def _read(texts: HttpTexts, body: bytes) -> None:
    texts.endpoint.work(texts.exchange(), [], body)


def _read_encode(body: bytes, content_type: str) -> None:
    encode.work_of(HttpTexts(encode, SITE).exchange(), read_document(body, content_type, SITE))


PARSERS: dict[str, dict[str, Parse]] = {
    "json": {
        "native": lambda body: tensors.to_arrays(values.decode(body, JSON), DECLARED),
        "split": lambda body: values.split(body, JSON, 1024),
        "kserve": lambda body: kserve_json.read_request(body, "m"),
        "websocket": lambda body: websocket.read_request(body.decode("latin-1")),
        "id": lambda body: websocket.id_of(body.decode("latin-1")),
        "generate": lambda body: read_generate(body, DECLARED, "m"),
        "encode": partial(_read_encode, content_type=JSON),
        "form": lambda body: read_document(body, FORM, SITE),
        **{each.endpoint.path: partial(_read, each) for each in ENDPOINTS},
    },
    "msgpack": {
        "native": lambda body: tensors.to_arrays(values.decode(body, MSGPACK), DECLARED),
        "split": lambda body: values.split(body, MSGPACK, 1024),
        "encode": partial(_read_encode, content_type=MSGPACK),
    },
    "grpc": {"infer": lambda body: kserve_grpc.read_request(kserve_grpc.parse_request(body))},
    "head": {"head": lambda body: HeadReader().read(body), "accept": lambda body: weighted(body.decode("latin-1"))},
}

ATOMS = (
    b"1", b"-1e308", b"4.9e-324", b"1e400", b"123456789012345678901234567890", b"0.1", b"null", b"true", b'""', b'"a"',
    rb'"\ud800"', rb'"\u0000"', b'"\xc3\xa9"', b"[]", b"{}", b"[1]", b'[""]', b'{"a":1}', b'{"":""}', b"[[]]", b"NaN",
)  # fmt: skip
PIECES = (b"a", rb"\n", rb"\u00e9", rb"\ud83d\ude00", rb"\ud83d", b"\xc3\xa9", rb"\\", b"&", b"%41", b"=")
KEYS = (
    b"inputs", b"outputs", b"parameters", b"x", b"s", b"texts", b"input", b"id", b"model", b"model_name", b"data", b"shape",
    b"datatype", b"name", b"cancel", b"prompt", b"is_tokenized", b"pairs", b"dimensions", b"user", b"query", b"documents", b"ids",
)  # fmt: skip
UNITS = (
    b"\x90", b"\x91\x90", b"\x01", b"\xc0", b"\xa0", b"\x80", b"\x81\xa0\xc0", b"\xc4\x00", b"\xd4\x00\x00",
    b"\xd7\xff" + bytes(8), b"\xcb" + bytes(8), b"\x92\x01\x01",
)  # fmt: skip


def repeated(unit: bytes, size: int) -> bytes:
    """Return so many units that they have about `size` bytes, with commas between."""
    return b",".join([unit] * max(1, size // (len(unit) + 1)))


def json_value(chance: Random, size: int, depth: int = 0) -> bytes:
    """Return a value of about so many bytes."""
    if size < 20 or depth > 4:
        return chance.choice(ATOMS)
    kind = chance.randrange(6)
    if kind == 0:
        unit = json_value(chance, chance.choice((10, 40, 200)), depth + 2)
        return b"[%b]" % repeated(unit, size)
    if kind == 1:
        levels = chance.choice((size // 2, min(size // 2, 500)))
        return b"[" * levels + chance.choice(ATOMS) + b"]" * levels
    if kind == 2:
        return b"{%b}" % b",".join(b'"%x":%b' % (place, chance.choice(ATOMS)) for place in range(size // 12))
    if kind == 3:
        return b'"%b"' % (chance.choice(PIECES) * (size // 4))
    if kind == 4:
        keys = chance.sample(KEYS, chance.randrange(1, 6))
        inner = [b'"%b":%b' % (key, json_value(chance, size // len(keys), depth + 1)) for key in keys]
        return b"{%b}" % b",".join(inner)
    return chance.choice((b"1", b"0", b"9")) * size


def json_body(chance: Random, size: int) -> bytes:
    """Return a body of JSON: a request of the Open Inference Protocol, one with a single field, or anything."""
    kind = chance.randrange(3)
    if kind == 0:
        shape = chance.choice((b"[1,%d]" % (size // 2), b"[%d,1]" % (size // 4), json_value(chance, size // 9)))
        return b'{"model_name":"m","inputs":[{"name":"x","datatype":"%b","shape":%b,"data":%b}],"outputs":%b}' % (
            chance.choice((b"FP32", b"BYTES", b"INT8", b"UINT64", b"BOOL", b"X" * (size // 3))), shape, json_value(chance, size),
            chance.choice((b"null", b"[%b]" % repeated(b'{"name":"a"}', size // 9))),
        )  # fmt: skip
    value = json_value(chance, size)
    return b'{"%b":%b}' % (chance.choice((b"texts", b"input", b"x", b"s")), value) if kind == 1 else value


def msgpack_body(chance: Random, size: int) -> bytes:
    """Return a list of one thing, perhaps in a field, or nested."""
    unit = chance.choice(UNITS)
    count = size // len(unit)
    body = b"\xdd" + count.to_bytes(4, "big") + unit * count
    return chance.choice((body, b"\x81\xa1x" + body, b"\x81\xa5texts" + body, unit * count, b"\x91" * size))


def grpc_body(chance: Random, size: int) -> bytes:
    """Return a message with one field many times over."""
    field = bytes([chance.choice((5, 6, 7, 4, 10, 15)) << 3 | 2, 0])
    plain = (field * (size // 2), b"\x7b\x7c" * (size // 2), b"\x7b" * size, b"\x2a\x80\x80\x80\x80\x00" * (size // 6))
    one = chance.randrange(3)
    if one == 0:
        return chance.choice(plain)
    request = kserve_grpc.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype=chance.choice(("BYTES", "FP32", "INT8", "UINT64")), shape=[1, size])
    if one == 1:
        tensor.contents.bytes_contents.extend([b""] * (size // 4))
        tensor.contents.int64_contents.extend([1] * (size // 4))
    else:
        for place in range(size // 20):
            (request if place % 2 else tensor).parameters[f"{place}"].string_param = "x"
    body: bytes = request.SerializeToString()
    return body


def head(chance: Random, size: int) -> bytes:
    """Return a head of a request, or what may stand in one of its fields."""
    size, begin = min(size, 60_000), b"POST / HTTP/1.1\r\nHost: t\r\n"
    return chance.choice(
        (
            begin + b"a:\r\n" * (size // 4), begin + b"x: " + b" " * size, b"POST /" + b"%41" * (size // 3) + b" HTTP/1.1",
            b"\r\n" * (size // 2), begin + b"Content-Length: " + b"1" * size, b"a/b;q=0.1," * (size // 10), b";" * size,
            b"," * size, b'"' * size, b'a/b;x="' + b'\\"' * (size // 2), b"a/b;q=" + b"0" * size,
        )
    )  # fmt: skip


BODIES = {"json": json_body, "msgpack": msgpack_body, "grpc": grpc_body, "head": head}


def cost(parse: Parse, body: bytes, *, memory: bool) -> str:
    """Return what is wrong with the cost of `body`; "" if nothing is."""
    if memory:
        tracemalloc.start()
    began = time.process_time()
    try:
        parse(body)
    except (WeirError, UnicodeDecodeError):
        pass
    except Exception as error:  # whatever it is: that is what is looked for
        return f"raised {type(error).__name__}: {error!s:.80}"
    finally:
        spent = 1000.0 * (time.process_time() - began)
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
    if memory:
        return f"{peak / len(body):.0f} times its size" if peak > MOST_TIMES * len(body) + 5e6 else ""
    return f"{1e6 * spent / len(body):.0f} ms/MB" if spent > MOST_MS * len(body) / 1e6 + 50.0 else ""


def main() -> int:
    """Try until the time is over; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="of what is tried")
    asked = parser.parse_args()
    chance, console = Random(asked.seed), Console()
    tried, found, began = 0, 0, time.monotonic()
    for second in track(range(asked.seconds), "seconds", console=console):
        while time.monotonic() < began + second + 1:
            for kind, make in BODIES.items():
                body = make(chance, chance.choice(SIZES))
                for name, parse in PARSERS[kind].items():
                    tried += 1
                    if wrong := cost(parse, body, memory=tried % 5 == 0):
                        found += 1
                        console.print(f"{kind}, {name}: {wrong}: {len(body)} bytes, {body[:60]!r}", markup=False)
    console.print(f"{tried} inputs, {found} of them too dear")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
