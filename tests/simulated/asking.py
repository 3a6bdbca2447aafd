"""The requests of simulated clients: their bytes, and which ends each may have."""

import gzip
import json
import math
import random
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tests.simulated.models import CODES, KSERVE_STATUS, OTHERS, RAISED, STATUS, answer_to

from weir.text_models.texts import Tokens

# Ends that any request may have: the server, not the request, is the reason.
ANYTIME = frozenset({"Overloaded", "ModelNotReady", "Draining", "DeadlineExceeded"})
# The error that a request has for what it asks for or is; what is not here is its own name.
_WANTED = {
    **dict.fromkeys(("ok", "late"), ""),
    **dict.fromkeys(("ValueError", "KeyError", "unwritable", "few", "many", "outside"), "ModelError"),
    **dict.fromkeys(("crash", "hang"), "ModelCrashed"),
    **dict.fromkeys(("malformed", "shape", "timeout", "name", "type"), "InvalidRequest"),
    **{"returns": "NotFound", "unknown": "ModelNotFound", "coding": "Unsupported"},
}
# What is not answered, and why.
WRONG = (*RAISED, *OTHERS, "malformed", "unknown", "shape", "timeout", "coding", "late")
RANKS = ("X-Weir-Class: bulk", "X-Request-Priority: 3", "X-Request-Priority: -1", "X-Batch-Key: a", "X-Batch-Key: b")
MORE = (b"\r\nConnection: close\r\n", b"\r\nExpect: 100-continue\r\n", b"\r\nAccept-Encoding: gzip\r\n")
ERROR_HEADER = "weir-error"
NAMED = b"/v2"  # the beginning of KServe's paths: whose errors have KServe's form
BINARY_HEADER = "inference-header-content-length"
_NUMBER, _BEGINNING = re.compile(rb'^\{"(?:n|id)": "?([0-9]+)'), 40
CODE_OF = {name: code for code, name in CODES.items()}


@dataclass(slots=True)
class Ask:
    """One request. `wanted` is the type of the error that it must have if the server gets to it; "" for its answer. `extra`: further ends that are right.

    `sent` is when its last byte went out, `since` when the server could begin it.
    """

    n: int
    data: bytes
    kserve: bool
    rows: int
    timeout: float
    wanted: str
    size: int = 0
    items: "list[Ask] | None" = None  # of a list
    do: str = ""
    extra: frozenset[str] = frozenset()
    began: float = math.inf  # before it is sent as a whole, if it goes in pieces
    sent: float = math.inf
    since: float = math.inf
    named_at: int = 0  # bytes of the connection after which the server can know its protocol
    named: bool = True  # whether they had arrived when its end came
    judged_by: Any = None  # of a protocol that has answers and errors of its own

    @property
    def names_itself_at(self) -> int:
        """How many of its bytes the server must have to know its protocol: those of KServe's prefix, or its whole path."""
        return self.data.find(NAMED) + len(NAMED) if self.judged_by is None else self.data.index(b" HTTP/")


def number_of(payload: Any) -> int:
    """Return the number of the request with this payload: of its first item, or row."""
    if isinstance(payload, dict):
        return int(payload["x"][0, 0] if "x" in payload else payload["n"])
    if isinstance(payload, Tokens):
        return int.from_bytes(payload.ids[:4], "little")
    first = payload[0] if isinstance(payload, list) else getattr(payload, "view", payload)
    opening = bytes(first[:_BEGINNING])
    found = _NUMBER.search(opening)
    return int.from_bytes(opening[:4], "little") if found is None else int(found[1])  # token ids of a front's text


def http(path: str, body: bytes, headers: tuple[str, ...] = (), framing: str = "") -> bytes:
    """Return a request with a body, whose length is stated, or its `framing`."""
    framing = framing or f"Content-Length: {len(body)}"
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: simulated", *headers, framing, "", ""]).encode() + body


def _chunked(draw: random.Random, path: str, body: bytes, headers: tuple[str, ...]) -> bytes:
    """Return a request whose body comes in chunks: the ASGI application answers it."""
    cuts = sorted({0, len(body), *(draw.randrange(len(body)) for _ in range(3))})
    chunks = [b"%x\r\n%b\r\n" % (stop - start, body[start:stop]) for start, stop in pairwise(cuts)]
    return http(path, b"".join(chunks) + b"0\r\n\r\n", headers, "Transfer-Encoding: chunked")


def _coded(path: str, headers: tuple[str, ...]) -> bytes:
    """Return a request in a transfer coding that the server does not read."""
    return http(path, b"", headers, "Transfer-Encoding: gzip, chunked")


class Mix(NamedTuple):
    """Of which kinds requests are, as shares, and what may become of those that are not answered."""

    tensors: float = 0.4
    lists: float = 0.1  # of the others
    short: float = 0.1  # have a deadline of their own
    chunked: float = 0.05  # of items
    filled: float = 0.05  # of items, to a long body
    ranked: float = 0.1  # have a class, a priority or a key
    more: float = 0.1  # have a header that changes how they travel
    wrong: tuple[str, ...] = WRONG


# Of requests of which each is read by another part of the server than the one before, and some are long.
MIXED = Mix(tensors=0.5, lists=0.1, chunked=0.7, filled=0.3)


def draw_mix(draw: random.Random) -> Mix:
    """Return a mix that has some kinds often, and others not at all."""
    wrong = tuple(do for do in WRONG if draw.random() < 0.3) or (draw.choice(WRONG),)
    return Mix(
        draw.choice((0.0, 0.4, 0.8)), draw.choice((0.0, 0.1, 0.6)), draw.choice((0.0, 0.1, 0.6)), draw.choice((0.0, 0.05, 0.6)),
        draw.choice((0.0, 0.05, 0.4)), draw.choice((0.0, 0.1, 0.6)), draw.choice((0.0, 0.1, 0.6)), wrong,
    )  # fmt: skip


def draw_ask(
    draw: random.Random, n: int, *, faults: float, timeout: float, small: bool = False, long: bool = False,
    mix: Mix = Mix(),  # noqa: B008  # it cannot be changed
) -> Ask:  # fmt: skip
    """Return a request with the number `n`. `faults` is the share of those that are not answered."""
    do = draw.choice(mix.wrong) if draw.random() < faults else "ok"
    limit = timeout
    if do == "late" or draw.random() < mix.short:
        limit = draw.choice((0.001, 0.02, 0.1, 0.5))
    if not long and draw.random() < mix.tensors:
        ask = _tensor_ask(draw, n, do, limit, timeout, mix)
    elif not (small or long) and draw.random() < mix.lists:
        ask = _list_ask(draw, n, limit, timeout, faults, mix)
    else:
        ask = _item_ask(draw, n, do, limit, timeout, small=small, long=long, mix=mix)
    if not small and draw.random() < mix.more:
        ask.data = ask.data.replace(b"\r\n", draw.choice(MORE), 1)
    return ask


def _list_ask(draw: random.Random, n: int, limit: float, timeout: float, faults: float, mix: Mix) -> Ask:
    """Return a list of items, which the ASGI application answers."""
    items = []
    wrong = [do for do in mix.wrong if do in RAISED or do in OTHERS]
    for place in range(draw.choice((1, 2, 5, 20))):
        do = draw.choice(wrong) if wrong and draw.random() < faults / 3 else "ok"
        items.append(Ask(n + place, b"", False, 1, limit, wanted_of(do), do=do))
    body = json.dumps([{"n": item.n, "do": item.do} for item in items]).encode()
    headers = _headers(draw, limit, timeout, mix)
    return Ask(n, http("/infer/items/batch", body, headers), False, len(items), limit, "", items=items)


def _headers(draw: random.Random, limit: float, timeout: float, mix: Mix) -> tuple[str, ...]:
    """Return what a request states besides its body."""
    headers: tuple[str, ...] = () if limit == timeout else (f"X-Request-Timeout: {limit}",)
    return (*headers, draw.choice(RANKS)) if draw.random() < mix.ranked else headers


def wanted_of(do: str) -> str:
    """Return the error that a request has that asks for `do`; "" for its answer."""
    return _WANTED.get(do, do)


def _item_ask(
    draw: random.Random, n: int, do: str, limit: float, timeout: float, *, small: bool, long: bool, mix: Mix
) -> Ask:
    size = 0 if small else draw.choice((10, 40_000, 100_000) if long else (0, 0, 0, 0, 10, 3_000, 40_000))
    fill = 0 if small or draw.random() >= mix.filled else draw.choice((5_000, 40_000, 300_000))
    path, wanted = "/infer/nothing" if do == "unknown" else "/infer/items", wanted_of(do)
    what = "ok" if do == "late" else do
    if do in STATUS and draw.random() < 0.5:
        what = f"pre:{do}"
    body = json.dumps({"n": n, "do": what, "size": size}).encode()
    if fill:
        body = b'%b, "fill": "%b"}' % (body[:-1], b"y" * fill)
    headers = _headers(draw, limit, timeout, mix)
    if do in ("malformed", "shape"):
        body = b'{"n": ' + body[:-1]
    elif do == "timeout":
        headers = ("X-Request-Timeout: soon",)
    elif do == "coding":
        return Ask(n, _coded(path, headers), False, 1, limit, wanted, size)
    if not small and draw.random() < mix.chunked:
        return Ask(n, _chunked(draw, path, body, headers), False, 1, limit, wanted, size)
    if not small and draw.random() < mix.more / 2.0:
        body, headers = gzip.compress(body, mtime=0), (*headers, "Content-Encoding: gzip")
    return Ask(n, http(path, body, headers), False, 1, limit, wanted, size)


def numbers(n: int, rows: int, do: str) -> list[int]:
    """Return the elements of the tensor of a request, which say what it asks for."""
    return [value for row in range(rows) for value in (n + row, 0 if row else CODE_OF.get(do, 0))]


def answers(n: int, rows: int) -> list[int]:
    """Return the elements of the right answer to it."""
    return [value for row in range(rows) for value in (n + row, answer_to(n + row))]


def tensor_document(
    n: int, rows: int, do: str, *, binary: bool, wants_binary: bool, **fields: Any
) -> tuple[dict[str, Any], bytes]:
    """Return a request of KServe in JSON, with these `fields`, and what is in binary form beside it."""
    data, raw = numbers(n, rows, do), b""
    tensor: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": [rows, 3 if do == "shape" else 2]}
    if binary:
        raw = np.array(data, "<i8").tobytes()
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = data
    outputs = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]} if wants_binary else {}
    return {**fields, "id": str(n), "inputs": [tensor], **outputs}, raw


def _tensor_ask(draw: random.Random, n: int, do: str, limit: float, timeout: float, mix: Mix) -> Ask:
    rows = draw.choice((1, 1, 2, 3, 30, 30))
    path = "/v2/models/nothing/infer" if do == "unknown" else "/v2/models/tensors/infer"
    wanted = "" if do in ("returns", "unwritable", "few", "many") else wanted_of(do)  # rows cannot ask for these
    binary = do not in ("malformed", "shape") and draw.random() < 0.3
    document, raw = tensor_document(n, rows, do, binary=binary, wants_binary=draw.random() < 0.2)
    if do == "coding":
        return Ask(n, _coded(path, ()), True, rows, limit, wanted)
    parameters: dict[str, Any] = {} if limit == timeout else {"timeout": round(limit * 1e6)}
    if draw.random() < mix.ranked:
        parameters |= draw.choice(({"class": "bulk"}, {"priority": 1}, {"priority": 7}))
    if do == "timeout":
        parameters = {"timeout": "soon"}
    if parameters:
        document["parameters"] = parameters
    body = json.dumps(document).encode()
    if do == "malformed":
        body = body[:-1]
    headers: tuple[str, ...] = (f"Inference-Header-Content-Length: {len(body)}",) if binary else ()
    return Ask(n, http(path, body + raw, headers), True, rows, limit, wanted)


def fault_of(ask: Ask, status: int, headers: dict[str, str], body: bytes, also: frozenset[str]) -> str:
    """Return what is wrong with a response to `ask`; "" if it is right. `also`: errors that it may have for what happened on the server."""
    if ask.judged_by is not None:
        return str(ask.judged_by.fault_of(ask, status, headers, body, also))
    if status == 200:
        if ask.sent == math.inf:
            return "it got an answer before it was sent"
        return fault_of_answer(ask, headers, body) if ask.items is None else _fault_of_list(ask, ask.items, body, also)
    kserve = ask.kserve and ask.named
    try:
        error = json.loads(body)["error"]
        kind = headers.get(ERROR_HEADER, "") if kserve else error["type"]
    except (ValueError, KeyError, TypeError) as failure:
        return f"status {status} with a body that is no error ({failure!r}): {body[:200]!r}"
    return fault_of_error(ask, kind, status, KSERVE_STATUS if kserve else STATUS, also)


def fault_of_status(kind: str, status: int, table: dict[str, int]) -> str:
    """Return what is wrong with the status of an error; "" if it is right."""
    return "" if table.get(kind) == status else f"{kind!r} has status {status}, must be {table.get(kind)}"


def fault_of_error(ask: Any, kind: str, status: int, table: dict[str, int], also: Collection[str]) -> str:
    """Return what is wrong with an error as the end of `ask`; "" if it is its own, or one of `also`."""
    wrong = kind != ask.wanted and kind not in also
    return fault_of_status(kind, status, table) or (
        f"it got {kind}, must get {ask.wanted or 'its answer'}" if wrong else ""
    )


def _fault_of_list(ask: Ask, items: list[Ask], body: bytes, also: frozenset[str]) -> str:
    """Return what is wrong with the response to a list, where each item has its own end."""
    found = json.loads(body)
    if ask.wanted or len(found) != len(items):
        return f"a list of {len(items)} got {len(found)} ends: {body[:200]!r}"
    faults = [
        fault_of_answer(item, {}, json.dumps(end["output"]).encode())
        if "output" in end
        else fault_of_error(item, end["error"]["type"], end["code"], STATUS, also)
        for item, end in zip(items, found, strict=True)
    ]
    return next(filter(None, faults), "")


def fault_of_answer(ask: Ask, headers: dict[str, str], body: bytes) -> str:
    """Return what is wrong with an answer to `ask`; "" if it is its own."""
    if ask.wanted:
        return f"it got an answer, must get {ask.wanted}: {body[:200]!r}"
    size = int(headers.get(BINARY_HEADER, len(body)))
    try:
        found = json.loads(body[:size])
    except ValueError:
        return f"the answer is no JSON: {body[:200]!r}"
    right: Any = {"n": ask.n, "v": answer_to(ask.n), "pad": "x" * ask.size}
    if ask.kserve:
        right = (
            str(ask.n),
            [{"name": "y", "datatype": "INT64", "shape": [ask.rows, 2], "data": answers(ask.n, ask.rows)}],
        )
        for output in found.get("outputs", ()) if body[size:] else ():
            output["data"] = np.frombuffer(body[size:], "<i8").tolist()
            output.pop("parameters", None)
        found = found.get("id"), found.get("outputs")
    return "" if found == right else f"the answer is not its own: {str(found)[:300]}, n={ask.n}"
