"""Simulated clients of gRPC: unary calls, streams of requests, and calls that ask about the server. Their bytes go to gRPC's simulated core."""

import math
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.simulated.asking import Ask, answers, numbers, wanted_of
from tests.simulated.channels import SILENCE, ChannelClient
from tests.simulated.fuzzing import FIRST_NUMBER, damaged
from tests.simulated.grpc_core import CANCELLED, DEADLINE_EXCEEDED, OK, UNAVAILABLE, Pairs, SimulatedCall
from tests.simulated.models import RAISED
from tests.simulated.relaying import LATENCIES
from tests.simulated.themes import some

from weir.frontends.grpc.services import INFERENCE
from weir.wire.kserve_grpc import message, methods

if TYPE_CHECKING:
    from tests.simulated.world import World

# What a caller must get for an error. This is not read from Weir: it is what Weir promises.
CODES = {
    "InvalidRequest": 3, "ValidationFailed": 3, "NotFound": 5, "ModelNotFound": 5, "TooLarge": 8, "MethodNotAllowed": 12,
    "UnsupportedMediaType": 3, "Unsupported": 12, "Conflict": 6, "Unauthorized": 16, "Forbidden": 7, "DeadlineExceeded": 4,
    "Cancelled": 1, "Overloaded": 8, "ModelNotReady": 14, "Draining": 14, "WorkerLost": 14, "ModelError": 13, "ModelCrashed": 13,
}  # fmt: skip
INFER, STREAM = f"/{INFERENCE}/ModelInfer", f"/{INFERENCE}/ModelStreamInfer"
REQUESTS_OF_STREAM = (1, 4, 256)  # of one stream that may be under way
ERROR = "weir-error"
_UNIMPLEMENTED = 12
_TICK = 0.001  # seconds: timers may be early by half of it
_STAYS = (0.0, 0.001, 0.01, 0.015, 0.1, 1.0)  # seconds after which a caller leaves
_METHODS = {method.path: method for method in methods(INFERENCE)}
_OFTEN = {"unary": 5, "many": 3, "cancel": 2, "stream": 3}
_STYLES = [each for each, times in _OFTEN.items() for _ in range(times)]
_STYLES += ["slow", "late", "empty", "damaged", "unknown", "look"]
_OF_STREAMS = (*("whole",) * 3, "cancel", "slow", "late")
_OF_SERVER = ("ServerLive", "ServerReady", "ServerMetadata", "ModelList")
_LOOKS = (*_OF_SERVER, "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
_OF_REQUESTS = (*RAISED, "crash", "hang", "unknown", "shape", "name", "type")


def draw_request(draw: random.Random, n: int, *, faults: float, timeout: float, named: bool) -> Ask:
    """Return a request with the number `n`, whose data are a ModelInferRequest. `named`: it has an id."""
    rows = draw.choice((1, 1, 1, 1, 2, 3, 30, 1500))
    do = draw.choice(_OF_REQUESTS) if draw.random() < faults else "ok"
    asked = message("inference.ModelInferRequest")(model_name="nothing" if do == "unknown" else "tensors")
    if named or draw.random() < 0.3:
        asked.id = str(n)
    place = asked.inputs.add(
        name="z" if do == "name" else "x",
        datatype="FP64" if do == "type" else "INT64",
        shape=[rows, 3 if do == "shape" else 2],
    )
    if draw.random() < 0.3:
        place.contents.int64_contents.extend(numbers(n, rows, do))
    else:
        asked.raw_input_contents.append(np.array(numbers(n, rows, do), "<i8").tobytes())
    if draw.random() < 0.2:
        asked.outputs.add(name="y")
    limit = timeout
    if draw.random() < 0.1:
        limit = draw.choice((0.002, 0.1, 1.0))
        asked.parameters["timeout"].int64_param = round(limit * 1e6)
    return Ask(n, asked.SerializeToString(), True, rows, limit, wanted_of(do), do=do)


def fault_of_message(ask: Ask, answer: Any) -> str:
    """Return what is wrong with a ModelInferResponse to `ask`; "" if it is its own answer."""
    if ask.wanted:
        return f"it got an answer, must get {ask.wanted}"
    asked_id = message("inference.ModelInferRequest").FromString(ask.data).id
    (output,) = answer.outputs or (None,)
    if output is None or (output.name, output.datatype, list(output.shape)) != ("y", "INT64", [ask.rows, 2]):
        return f"the answer has other outputs: {str(answer)[:200]}"
    raw = answer.raw_output_contents
    found = np.frombuffer(raw[0], "<i8").tolist() if raw else list(output.contents.int64_contents)
    right = found == answers(ask.n, ask.rows) and answer.id == asked_id
    return "" if right else f"the answer is not its own: {found[:10]}, id {answer.id!r}, n={ask.n}"


class CallClient(ChannelClient):
    """Makes one call each turn, or several at once, and waits for their ends; or leaves before that."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        self._peer = f"ipv4:192.0.2.1:{index}"
        self._styles = some(self.draw, _STYLES)
        self._open: set[_Call] = set()
        self._round = 0

    def turn(self) -> None:
        """Make some calls."""
        draw = self.draw
        server = self.site.listening(self._peer)
        if server is None:
            self.end(1.0)
            return
        style = draw.choice(self._styles)
        self._round += 1
        count = draw.choice((2, 5, 20)) if style in ("many", "cancel") else 1
        begun = [self._make(style) for _ in range(count)]
        self._open = set(begun)
        for call in begun:
            self.asked += len(call.asks)
            call.begin(server, self._peer)
        until = max((call.until for call in begun), default=0.0)
        self.later(max(0.0, until + SILENCE - self.site.loop.now), self._check_for_hangs, self._round)

    def _make(self, style: str) -> "_Call":
        draw, plan = self.draw, self.site.plan
        asked = partial(draw_request, draw, faults=plan.wrong, timeout=plan.timeout)
        if style == "stream":
            count = draw.choice((1, 3, 20))
            return _Stream(self, style, [asked(self.number(), named=True) for _ in range(count)])
        if style == "look":
            return _Look(self, draw.choice(_LOOKS))
        if style == "damaged":
            ask = asked(FIRST_NUMBER + self.number(), named=False)
            ask.data = damaged(draw, ask.data, asked(FIRST_NUMBER + self.number(), named=True).data)
            return _Damaged(self, style, [ask])
        return _Unary(self, style, [asked(self.number(), named=False)])

    def leave(self) -> None:
        """Close the connection."""
        self.site.hang_up(self._peer)

    def over(self, call: "_Call") -> None:
        """A call has ended."""
        self._open.discard(call)
        if not self._open:
            self._round += 1
            if self.draw.random() < 0.1:
                self.leave()
            self.end()

    def _check_for_hangs(self, number: int) -> None:
        late = self._round == number and [call for call in self._open if not call.excused]
        if late:
            self.check_hang(sorted(ask.n for call in late for ask in call.asks), min(call.began for call in late))


class _Call:
    """One call and what comes of it. It is the listener of its SimulatedCall."""

    method = INFER

    def __init__(self, client: CallClient, style: str, asks: list[Ask]) -> None:
        self.client = client
        self.style = style
        self.asks = asks
        self.messages: list[bytes] = []
        self.began = client.site.loop.now
        self.excused = style in ("slow", "late", "cancel", "damaged")  # whether its time is not bounded
        draw, most = client.draw, client.site.plan.timeout
        self.deadline = draw.choice((0.001, 0.02, 0.1, 0.5, 2 * most)) if draw.random() < 0.4 else math.inf
        self.metadata: Pairs = ()
        if draw.random() < 0.1:
            self.metadata = (("x-weir-class", draw.choice(("bulk", "interactive"))), ("x-other", "1"))
        self.until = self.began + self.limit(max((ask.timeout for ask in asks), default=1.0))
        self.ends = 0
        self.left = False
        self.call: SimulatedCall

    def limit(self, most: float) -> float:
        """Return after how many seconds a request must end: a call's own deadline counts instead of the model's timeout, of which `most` is a multiple."""
        return most if math.isinf(self.deadline) else self.deadline

    def begin(self, server: Any, peer: str) -> None:
        """Call the server."""
        client, draw = self.client, self.client.draw
        window = draw.choice((0, 1)) if self.style == "slow" else math.inf
        self.call = server.call(peer, self.method, self.metadata, self.began + self.deadline, self, window)
        if self.style == "late":
            client.later(draw.choice((0.001, 0.3, 3.0)), self._send)
        else:
            self._send()
        if self.style == "cancel":
            client.later(draw.choice(_STAYS), self._leave)
        elif self.style == "slow":
            client.later(draw.choice((0.01, 0.3, 3.0, 100.0)), self._read_on)

    def _send(self) -> None:
        if self.style != "empty":
            for ask in self.asks:
                ask.sent = ask.since = self.client.site.loop.now
                self.call.send(ask.data)
        self.call.half_close()

    def _read_on(self) -> None:
        if not self.ends:
            self.call.take(1)
            self.client.later(self.client.draw.choice((0.01, 0.3, 3.0)), self._read_on)

    def _leave(self) -> None:
        if not self.ends:
            self.left = True
            self.client.site.gone(self.asks)
            self.call.leave()

    # What comes back.

    def message(self, body: bytes) -> None:
        """See Listener."""
        if self.ends:
            self.broken("a message came after the end")
        self.note(body)
        self.messages.append(body)

    def note(self, body: bytes) -> None:
        """Add a message to the trace, whatever the order of the entries of its maps, which depends on the process."""
        self.client.note(bytes(sorted(body)))

    def ended(self, code: int, text: str, trailers: Pairs) -> None:
        """See Listener."""
        self.ends += 1
        if self.ends > 1:
            self.broken(f"it ended twice, the second time with {code} {text!r}")
            return
        site = self.client.site
        self.client.note(b"%d %b" % (code, repr(trailers).encode()))
        site.responses[f"call {code}"] += 1
        if not self.excused:
            self.client.check_late([ask.n for ask in self.asks][:3], self.until, self.began)
        if self.left:
            pass
        elif code == DEADLINE_EXCEEDED and not trailers and site.loop.now >= self.began + self.deadline - _TICK:
            site.gone(self.asks)  # gRPC has ended it
        elif fault := self.fault_of(code, dict(trailers).get(ERROR, "")):
            self.broken(f"{fault}: {text[:200]!r}")
        self.client.later(0.0, self.client.over, self)

    def fault_of(self, code: int, kind: str) -> str:
        """Return what is wrong with the end of the call, by an error of this `kind` if it is named; "" if it is right."""
        raise NotImplementedError

    def is_cut(self, code: int) -> bool:
        """Return whether the connection has gone, or a client that did not read was left, and whether that was right."""
        site = self.client.site
        if code == UNAVAILABLE:
            site.gone(self.asks)
            return self.call.was_cut or not site.ready or site.stood_still(self.began)
        return code == CANCELLED and self.style == "slow"

    def broken(self, what: str) -> None:
        """Something is wrong."""
        self.client.broken(f"n={[ask.n for ask in self.asks][:3]}: {what}")


class _Unary(_Call):
    """A call of ModelInfer."""

    def __init__(self, client: CallClient, style: str, asks: list[Ask]) -> None:
        super().__init__(client, style, asks)
        (self._ask,) = asks
        if style == "unknown":
            self.method = f"/{INFERENCE}/ModelInference"
        elif client.draw.random() < client.site.plan.wrong / 10:
            self.metadata = (("x-weir-class", "wrong"),)
            if self._ask.do != "unknown":
                self._ask.wanted = "InvalidRequest"

    def fault_of(self, code: int, kind: str) -> str:
        """See _Call."""
        ask = self._ask
        if code == OK:
            if len(self.messages) != 1:
                return f"it ended well, with {len(self.messages)} messages"
            return fault_of_message(ask, message("inference.ModelInferResponse").FromString(self.messages[0]))
        if self.messages:
            return f"it has an answer, and ended with {code}"
        unknown = code == _UNIMPLEMENTED and self.style in ("unknown", "empty")
        if kind or not (unknown or self.is_cut(code)):
            self.client.check_error(ask, kind, code, CODES)
        return ""


class _Damaged(_Call):
    """A call of ModelInfer with a damaged message: it may be right by chance, and must have some end."""

    def fault_of(self, code: int, kind: str) -> str:
        """See _Call."""
        right = code == OK or CODES.get(kind) == code or (not kind and self.is_cut(code))
        return "" if right else f"a damaged message got {code} with {kind!r}"


class _Stream(_Call):
    """A stream of requests, which the client closes after the last one. Its answers come in any order."""

    method = STREAM

    def __init__(self, client: CallClient, style: str, asks: list[Ask]) -> None:
        super().__init__(client, client.draw.choice(_OF_STREAMS), asks)
        plan = client.site.plan
        most = max(ask.timeout for ask in asks)
        rounds = 1 + len(asks) // plan.stream_requests
        passing = 2.0 * max(LATENCIES) * len(asks) if plan.fronts else 0.0  # of one response after another by a front
        self.until = self.began + self.limit(rounds * most + passing)
        self._waiting = {str(ask.n): ask for ask in asks}
        if "max_waiting_bytes" in plan.http:
            self.excused = True  # its requests may wait for memory

    def message(self, body: bytes) -> None:
        """See Listener."""
        super().message(body)
        found = message("inference.ModelStreamInferResponse").FromString(body)
        answer = found.infer_response
        if "max_waiting_bytes" in self.client.site.plan.http and found.error_message and not answer.id:
            return  # there was no memory to read the id
        ask = self._waiting.pop(answer.id, None)
        if ask is None:
            self.broken(f"a response to nothing, or a second one: {str(found)[:300]}")
        elif found.error_message:
            error = answer.parameters[ERROR].string_param
            self.client.check_error(ask, error, CODES.get(error, -1), CODES)
        elif fault := fault_of_message(ask, answer):
            self.broken(f"{fault}: {str(found)[:300]}")

    def fault_of(self, code: int, kind: str) -> str:
        """See _Call."""
        if code == OK:
            unread = "max_waiting_bytes" in self.client.site.plan.http
            return "" if unread or not self._waiting else f"it ended without responses to {sorted(self._waiting)}"
        if (not kind and self.is_cut(code)) or CODES.get(kind) == code == UNAVAILABLE or kind == "Overloaded":
            return ""
        return f"a stream ended with {code}, {kind!r}"


class _Look(_Call):
    """A call that asks about the server."""

    def __init__(self, client: CallClient, name: str) -> None:
        super().__init__(client, "look", [])
        self.method = f"/{INFERENCE}/{name}"
        self._name = name
        self.deadline = math.inf
        self.metadata = ()

    def note(self, body: bytes) -> None:
        """Add that a message has come: statistics have times of the real clock."""
        self.client.note(b"")

    def _send(self) -> None:
        request = _METHODS[self.method].request()
        if self._name not in _OF_SERVER:
            request.name = "tensors"
        self.call.send(request.SerializeToString())
        self.call.half_close()

    def fault_of(self, code: int, kind: str) -> str:
        """See _Call."""
        if code != OK:
            right = CODES.get(kind) == code and kind in ("Overloaded", "Draining", "ModelNotReady")
            return "" if right or (not kind and self.is_cut(code)) else f"{self._name} got {code}, {kind!r}"
        if len(self.messages) != 1:
            return f"{self._name} ended well, with {len(self.messages)} messages"
        answer = _METHODS[self.method].response.FromString(self.messages[0])
        ready = None if self.client.site.stood_still(self.began) else self.client.site.ready
        if self._name == "ServerReady" and ready is not None and answer.ready != ready:
            return f"ServerReady says {answer.ready} although ready is {ready}"
        if self._name == "ServerLive" and not answer.live:
            return "the server says that it is not live"
        if self._name == "ModelMetadata" and [each.name for each in answer.inputs] != ["x"]:
            return f"the metadata are of another model: {answer}"
        return ""
