"""The requests of simulated clients: their bytes, and which ends each may have."""

import gzip
import json
import math
import random
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from tests.simulated.models import CODES, KSERVE_STATUS, OTHERS, RAISED, STATUS, answer_to

from weir.text_models.texts import Tokens

# Ends that any request may have: the server, not the request, is the reason.
ANYTIME = frozenset({"Overloaded", "ModelNotReady", "Draining", "DeadlineExceeded"})
MODEL_FAULTS = {
    "ValueError": "ModelError",
    "KeyError": "ModelError",
    "unwritable": "ModelError",
    "few": "ModelError",
    "many": "ModelError",
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


class Judge(Protocol):
    """Knows what is right of a response."""

    def fault_of(self, ask: "Ask", status: int, headers: dict[str, str], body: bytes, also: frozenset[str]) -> str:
        """See the function `fault_of`."""


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
    sent: float = math.inf
    since: float = math.inf
    named_at: int = 0  # bytes of the connection after which the server can know its protocol
    named: bool = True  # whether they had arrived when its end came
    judged_by: "Judge | None" = None  # of a protocol that has answers and errors of its own

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


def http(path: str, body: bytes, headers: tuple[str, ...] = ()) -> bytes:
    """Return a request with a body."""
    lines = [f"POST {path} HTTP/1.1", "Host: simulated", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def _chunked(draw: random.Random, path: str, body: bytes, headers: tuple[str, ...]) -> bytes:
    """Return a request whose body comes in chunks: the ASGI application answers it."""
    lines = [f"POST {path} HTTP/1.1", "Host: simulated", *headers, "Transfer-Encoding: chunked", "", ""]
    cuts = sorted({0, len(body), *(draw.randrange(len(body)) for _ in range(3))})
    chunks = [body[start:stop] for start, stop in pairwise(cuts)]
    return "\r\n".join(lines).encode() + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"


def _coded(path: str, headers: tuple[str, ...]) -> bytes:
    """Return a request in a transfer coding that the server does not read."""
    lines = [f"POST {path} HTTP/1.1", "Host: simulated", *headers, "Transfer-Encoding: gzip, chunked", "", ""]
    return "\r\n".join(lines).encode()


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
    chance = draw.random()
    do = "ok"
    if chance < faults:
        do = draw.choice(mix.wrong)
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
        items.append(Ask(n + place, b"", False, 1, limit, _wanted(do)))
        items[-1].do = do
    body = json.dumps([{"n": item.n, "do": item.do} for item in items]).encode()
    headers = _headers(draw, limit, timeout, mix)
    return Ask(n, http("/infer/items/batch", body, headers), False, len(items), limit, "", items=items)


def _headers(draw: random.Random, limit: float, timeout: float, mix: Mix) -> tuple[str, ...]:
    """Return what a request states besides its body."""
    headers: tuple[str, ...] = () if limit == timeout else (f"X-Request-Timeout: {limit}",)
    return (*headers, draw.choice(RANKS)) if draw.random() < mix.ranked else headers


def _wanted(do: str) -> str:
    """Return the error that an item has that asks for `do`; "" for its answer."""
    if do == "ok":
        return ""
    return {"returns": "NotFound", "crash": "ModelCrashed", "hang": "ModelCrashed"}.get(do) or MODEL_FAULTS.get(do, do)


def _item_ask(
    draw: random.Random, n: int, do: str, limit: float, timeout: float, *, small: bool, long: bool, mix: Mix
) -> Ask:
    size = 0 if small else draw.choice((10, 40_000, 100_000) if long else (0, 0, 0, 0, 10, 3_000, 40_000))
    fill = 0 if small or draw.random() >= mix.filled else draw.choice((5_000, 40_000, 300_000))
    path, wanted, what = "/infer/items", MODEL_FAULTS.get(do, do), do
    if do in ("ok", "late"):
        wanted, what = "", "ok"
    elif do == "unknown":
        path, wanted = "/infer/nothing", "ModelNotFound"
    elif do == "returns":
        wanted = "NotFound"
    elif do in ("crash", "hang"):
        wanted = "ModelCrashed"
    elif do in STATUS and draw.random() < 0.5:
        what = f"pre:{do}"
    body = json.dumps({"n": n, "do": what, "size": size}).encode()
    if fill:
        body = b'%b, "fill": "%b"}' % (body[:-1], b"y" * fill)
    headers = _headers(draw, limit, timeout, mix)
    if do in ("malformed", "shape"):
        body, wanted = b'{"n": ' + body[:-1], "InvalidRequest"
    elif do == "timeout":
        headers, wanted = ("X-Request-Timeout: soon",), "InvalidRequest"
    elif do == "coding":
        return Ask(n, _coded(path, headers), False, 1, limit, "Unsupported", size)
    if not small and draw.random() < mix.chunked:
        return Ask(n, _chunked(draw, path, body, headers), False, 1, limit, wanted, size)
    if not small and draw.random() < mix.more / 2.0:
        body, headers = gzip.compress(body, mtime=0), (*headers, "Content-Encoding: gzip")
    return Ask(n, http(path, body, headers), False, 1, limit, wanted, size)


def _tensor_ask(draw: random.Random, n: int, do: str, limit: float, timeout: float, mix: Mix) -> Ask:
    rows = draw.choice((1, 1, 2, 3, 30, 30))
    path, wanted, code = "/v2/models/tensors/infer", MODEL_FAULTS.get(do, do), CODE_OF.get(do, 0)
    if do in ("ok", "late", "returns", "unwritable", "few", "many"):
        wanted = ""
    elif do == "unknown":
        path, wanted = "/v2/models/nothing/infer", "ModelNotFound"
    elif do in ("crash", "hang"):
        wanted = "ModelCrashed"
    shape = [rows, 2]
    data = [value for row in range(rows) for value in (n + row, code if row == 0 else 0)]
    if do == "shape":
        shape, wanted = [rows, 3], "InvalidRequest"
    tensor: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": shape}
    document: dict[str, Any] = {"id": str(n), "inputs": [tensor]}
    raw = b""
    binary = do not in ("malformed", "shape") and draw.random() < 0.3
    if binary:
        raw = np.array(data, "<i8").tobytes()
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = data
    if draw.random() < 0.2:
        document["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}]
    if do == "coding":
        return Ask(n, _coded(path, ()), True, rows, limit, "Unsupported")
    parameters: dict[str, Any] = {} if limit == timeout else {"timeout": round(limit * 1e6)}
    if draw.random() < mix.ranked:
        parameters |= draw.choice(({"class": "bulk"}, {"priority": 1}, {"priority": 7}))
    if parameters:
        document["parameters"] = parameters
    if do == "timeout":
        document["parameters"], wanted = {"timeout": "soon"}, "InvalidRequest"
    body = json.dumps(document).encode()
    if do == "malformed":
        body, wanted = body[:-1], "InvalidRequest"
    headers: tuple[str, ...] = (f"Inference-Header-Content-Length: {len(body)}",) if binary else ()
    return Ask(n, http(path, body + raw, headers), True, rows, limit, wanted)


def fault_of(ask: Ask, status: int, headers: dict[str, str], body: bytes, *, also: frozenset[str] = frozenset()) -> str:
    """Return what is wrong with a response to `ask`; "" if it is right. `also`: errors that it may have for what happened on the server."""
    if ask.judged_by is not None:
        return ask.judged_by.fault_of(ask, status, headers, body, also)
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
    return _fault_of_error(ask, kind, status, f"{body[:300]!r}", also, kserve=kserve)


def _fault_of_error(ask: Ask, kind: str, status: int, shown: str, also: frozenset[str], *, kserve: bool = False) -> str:
    table = KSERVE_STATUS if kserve else STATUS
    if kind not in table:
        return f"status {status} with an error that no table has: {kind!r}: {shown}"
    if table[kind] != status:
        return f"{kind} has status {status}, must be {table[kind]}"
    if kind != ask.wanted and kind not in ANYTIME | ask.extra | also:
        return f"it got {kind}, must get {ask.wanted or 'its answer'}: {shown}"
    return ""


def _fault_of_list(ask: Ask, items: list[Ask], body: bytes, also: frozenset[str]) -> str:
    """Return what is wrong with the response to a list, where each item has its own end."""
    found = json.loads(body)
    if ask.wanted or len(found) != len(items):
        return f"a list of {len(items)} got {len(found)} ends: {body[:200]!r}"
    for item, end in zip(items, found, strict=True):
        if "output" in end:
            fault = fault_of_answer(item, {}, json.dumps(end["output"]).encode())
        else:
            fault = _fault_of_error(item, end["error"]["type"], end["code"], str(end)[:300], also)
        if fault:
            return fault
    return ""


def fault_of_answer(ask: Ask, headers: dict[str, str], body: bytes) -> str:
    """Return what is wrong with an answer to `ask`; "" if it is its own."""
    if ask.wanted:
        return f"it got an answer, must get {ask.wanted}: {body[:200]!r}"
    header, raw = body, b""
    if size := headers.get(BINARY_HEADER):
        header, raw = body[: int(size)], body[int(size) :]
    try:
        found = json.loads(header)
    except ValueError:
        return f"the answer is no JSON: {body[:200]!r}"
    if not ask.kserve:
        wanted: Any = {"n": ask.n, "v": answer_to(ask.n), "pad": "x" * ask.size}
        return "" if found == wanted else f"the answer is not its own: {str(found)[:200]}, n={ask.n}"
    values = [value for row in range(ask.rows) for value in (ask.n + row, answer_to(ask.n + row))]
    right = {"name": "y", "datatype": "INT64", "shape": [ask.rows, 2], "data": values}
    for output in found.get("outputs", ()) if raw else ():
        output["data"] = np.frombuffer(raw, "<i8").tolist()
        output.pop("parameters", None)
    if found.get("id") == str(ask.n) and found.get("outputs") == [right]:
        return ""
    return f"the answer is not its own: {str(found)[:300]}, n={ask.n}"
