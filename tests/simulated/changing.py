"""Simulated clients that load, unload and ask for the models of a repository, over HTTP and gRPC, and look at its index."""

import json
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulated.asking import Ask, fault_of_status, http, wanted_of
from tests.simulated.calls import CODES, ERROR
from tests.simulated.catalog import CHANGING, IN, OUT, Catalog
from tests.simulated.channels import LATE, SILENCE, ChannelClient, Line
from tests.simulated.grpc_core import CANCELLED, OK, UNAVAILABLE, Pairs
from tests.simulated.models import KSERVE_STATUS, RAISED, STATUS, answer_to
from tests.simulated.themes import some

from weir.catalog.manager import READ_WITHIN
from weir.frontends.grpc.services import INFERENCE
from weir.messages import label_of
from weir.wire.kserve_grpc import methods

if TYPE_CHECKING:
    from tests.simulated.world import World

_FOLLOWS = 1.0  # seconds in which a front knows what has changed
_LOAD, _UNLOAD, _INDEX, _READY, _ASK, _ADD, _REMOVE = "load", "unload", "index", "ready", "ask", "add", "remove"
_TURNS = (*(_ASK,) * 12, *(_LOAD,) * 3, *(_UNLOAD,) * 2, _INDEX, _READY)
_OF_WORKERS = (*(_ADD,) * 3, *(_REMOVE,) * 3)
_STAYS = (0.0, 0.001, 0.05, 1.0)  # seconds after which the caller of a change leaves
_METHODS = {method.path.rpartition("/")[2]: method for method in methods(INFERENCE)}
_OF_GRPC = {_LOAD: "RepositoryModelLoad", _UNLOAD: "RepositoryModelUnload", _INDEX: "RepositoryIndex"}


@dataclass(slots=True)
class ModelAsk(Ask):
    """A request for a model of the repository, or one that changes or shows it."""

    kind: str = _ASK
    name: str = ""
    version: str = ""

    @property
    def label(self) -> str:
        """By what the catalog knows it."""
        return label_of(self.name, self.version)


class ChangeClient(ChannelClient):
    """Does one thing after the other: asks for some models, changes one, or looks."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        draw = self.draw
        plan = self._catalog.plan
        self._names = [name for name in plan.names if draw.random() < 0.7] or plan.names
        if plan.resized or plan.default is not None:  # few models have many changes
            self._names = [next(iter(plan.models)), *plan.chains]
        self._kinds = some(draw, _TURNS) if draw.random() < 0.5 else _TURNS
        if plan.resized:
            self._kinds += _OF_WORKERS
        self._line: Line | None = None
        self._round = 0

    @property
    def _catalog(self) -> Catalog:
        catalog = self.site.catalog
        assert catalog is not None
        return catalog

    def turn(self) -> None:
        """Do one thing."""
        draw = self.draw
        kind = draw.choice(self._kinds)
        self._round += 1
        peer = f"ipv4:127.0.0.1:{self.index}"
        server = self.site.listening(peer)
        if kind in (_LOAD, _UNLOAD, _INDEX) and server is not None and draw.random() < 0.4:
            self.asked += 1
            _ControlCall(self, self._drawn(kind, named=False)).begin(server, peer)
            return
        line = self._line
        if line is None or not line.usable:
            line = self._line = Line(self, None)
        if line.transport is None:
            self._line = None
            self.end(1.0)
            return
        asks = [self._drawn(kind) for _ in range(draw.choice((1, 1, 3, 8)) if kind == _ASK else 1)]
        self.asked += len(asks)
        line.add(asks)
        for ask in asks:
            ask.sent = ask.since = self.site.loop.now
        if kind == _ASK:
            self._watch(line)
        line.transport.send(b"".join(ask.data for ask in asks))
        if kind not in (_ASK, _INDEX) and draw.random() < 0.2:
            self.later(draw.choice(_STAYS), self._leave, line, self._round)

    def _drawn(self, kind: str, *, named: bool = True) -> ModelAsk:
        """Return a request. `named`: it may name a version."""
        draw, n = self.draw, self.number()
        name = draw.choice(self._names)
        versions = self._catalog.plan.versions_of(name)
        version = draw.choice(versions) if named and versions != ("",) and draw.random() < 0.6 else ""
        at = f"{name}/versions/{version}" if version else name
        wanted = ""
        if kind == _READY:
            data = f"GET /v2/models/{at}/ready HTTP/1.1\r\nHost: simulated\r\n\r\n".encode()
        elif kind == _INDEX:
            data = http("/v2/repository/index", draw.choice((b"{}", b'{"ready": true}')))
        elif kind in (_ADD, _REMOVE):
            name, version = self._names[0], ""  # a chain has no workers
            body = draw.choice((b"{}", b'{"share": false}', b'{"share": false}')) if kind == _ADD else b"{}"
            data = http(f"/v2/workers/{name}/{'load' if kind == _ADD else 'unload'}", body)
        elif kind in (_LOAD, _UNLOAD):
            if draw.random() < 0.05:
                at = name = "nothing"
                version, wanted = "", "ModelNotFound"
            body = b"{}"
            if kind == _LOAD and not wanted and draw.random() < 0.1:
                body, wanted = b'{"nonsense": 1}', "InvalidRequest"
            if kind == _UNLOAD and self._catalog.plan.chains_of(name) and draw.random() < 0.3:
                body = b'{"parameters": {"unload_dependents": true}}'
            data = http(f"/v2/repository/models/{at}/{kind}", body)
        else:
            return self._request(draw, n, name, version)
        return ModelAsk(n, data, True, 0, math.inf, wanted, kind=kind, name=name, version=version)

    def _request(self, draw: random.Random, n: int, name: str, version: str) -> ModelAsk:
        plan = self.site.plan
        do, wanted = "ok", ""
        chain = self._catalog.plan.chains.get(name, ())
        if draw.random() < plan.wrong / 2:
            more = ("ModelNotFound",) * 8 if chain else ()  # a chain has others of these itself
            do = draw.choice((*RAISED, "crash", *more))
            wanted = wanted_of(do)
        limit = plan.timeout
        headers: tuple[str, ...] = ()
        if draw.random() < 0.1:
            limit = draw.choice((0.02, 0.5, 50.0))
            headers = (f"X-Request-Timeout: {limit}",)
        item = {"n": n, "do": do, "size": 0}
        if chain and draw.random() < 0.5:
            item |= {"do": "ok", "then": do}
            wanted = wanted if len(chain) > 1 else ""
        body = json.dumps(item).encode()
        if version:
            tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [body.decode()]}
            document = {"inputs": [tensor], "parameters": {"timeout": round(limit * 1e6)} if headers else {}}
            data = http(f"/v2/models/{name}/versions/{version}/infer", json.dumps(document).encode())
            return ModelAsk(n, data, True, 1, limit, wanted, do=do, name=name, version=version)
        return ModelAsk(n, http(f"/infer/{name}", body, headers), False, 1, limit, wanted, do=do, name=name)

    # What comes back.

    def answered(self, line: Line, status: int) -> None:
        """A response has come on `line`."""
        if (ask := line.answers(status)) is None:
            return
        self.site.responses[str(status)] += 1
        if fault := self._fault_of(ask, status, line.headers, bytes(line.body)):
            self.broken(f"n={ask.n}, {ask.kind} {ask.name}: {fault}")
        line.go_on(self.site.loop.now)
        if line.waiting:
            self._watch(line)
        elif line is self._line:
            self.end()

    def lost(self, line: Line) -> None:
        """The connection has gone."""
        self.note(b"closed")
        if line.waiting and not (line.excused or line.ending):
            self.broken(f"the connection closed without a response to n={line.waiting[0].n}")
        self.site.gone(line.waiting)
        if line is self._line:
            self._line = None
            if line.waiting:
                self.end()
        line.waiting.clear()

    def _leave(self, line: Line, turn: int) -> None:
        """Leave a change: it is made all the same."""
        if self._round == turn and line is self._line and line.waiting and line.transport is not None:
            self._line = None
            line.excused = True
            line.waiting = deque()
            line.transport.reset()
            self.end()

    def leave(self) -> None:
        """Close the connection."""
        line, self._line = self._line, None
        if line is not None:
            line.hang_up()

    def _watch(self, line: Line) -> None:
        ask: Any = line.waiting[0]
        until = ask.since + ask.timeout + (READ_WITHIN if self._catalog.plan.on_demand else 0.0)
        self.site.loop.call_at(until + SILENCE, self._check_for_hangs, line, ask)

    def _check_for_hangs(self, line: Line, ask: ModelAsk) -> None:
        if line.waiting and line.waiting[0] is ask:
            self.check_hang(f"{ask.n} for {ask.name}", ask.since)

    def _fault_of(self, ask: ModelAsk, status: int, headers: dict[str, str], body: bytes) -> str:
        if ask.kind == _INDEX and status == 200:
            return ""  # it is looked at where it is made
        if ask.kind == _ADD and status == 200 and body.decode() != ask.name:
            return f"it got the endpoint {body!r}"
        document: Any = {} if ask.kind == _ADD and status == 200 else json.loads(body)
        kind = ""
        if status != 200:
            error = document.get("error")
            own = isinstance(error, dict)  # of KServe's paths, too, what is refused before the path is read
            kind = error["type"] if own else headers.get(ERROR, "")
            if own == ask.kserve and kind not in ("Overloaded", "TooLarge"):
                return f"an error in another form: {body[:200]!r}"
            if fault := fault_of_status(kind, status, KSERVE_STATUS if ask.kserve else STATUS):
                return f"{fault}: {body[:200]!r}"
        if ask.kind == _ASK:
            return self._fault_of_request(ask, kind, document)
        if ask.kind == _READY:
            return self._fault_of_ready(ask, kind)
        return self.fault_of_change(ask, kind)

    def _allowed(self, ask: ModelAsk, phases: set[str]) -> set[str]:
        """Return the errors that a request may have; "" stands for none."""
        catalog, site = self._catalog, self.site
        allowed = {"Overloaded", "DeadlineExceeded", ask.wanted}
        if site.draining:
            allowed |= {"Draining", "ModelNotReady"}
        parts = catalog.plan.parts(ask.name)
        if not catalog.died.isdisjoint(parts):
            allowed |= {"ModelCrashed", "ModelNotReady"}
        if "max_waiting_bytes" in site.plan.http:
            allowed.add("TooLarge")
        if catalog.plan.on_demand:
            slowest = max(each.start for each in site.plan.workers.values())  # whose loads say how long others take
            if not (catalog.plan.easy and ask.timeout >= max(3.0, 8.0 * slowest)):
                allowed.add("ModelNotReady")
            if catalog.plan.too_large(ask.name):
                allowed.discard("")
        elif phases == {OUT}:
            allowed = {"ModelNotFound", "Overloaded", *(("Draining", "ModelNotReady") if site.draining else ())}
        since = ask.sent - (_FOLLOWS if site.plan.fronts else 0.0)
        if CHANGING in phases:
            allowed |= {"ModelNotReady", "Draining"}
        elif not ask.version and any(catalog.has_drained(each, since) for each in parts):
            allowed.add("Draining")
        if not catalog.plan.on_demand and phases != {IN}:
            allowed.add("ModelNotFound")
        return allowed

    def _fault_of_request(self, ask: ModelAsk, kind: str, document: Any) -> str:
        site, catalog = self.site, self._catalog
        if site.stood_still(ask.sent):
            return ""
        late = site.loop.now - ask.since - ask.timeout
        if catalog.plan.on_demand:  # its model may have been read first
            most = ask.since + READ_WITHIN
            until = min(max(ask.since, catalog.read_at(ask.name)), most) + ask.timeout
            late = site.loop.now - max(until, most if kind in ("ModelNotReady", "Draining") else 0.0)
        if late > LATE:
            return f"it ended {late:.3f} s after its deadline"
        sent = ask.sent - (_FOLLOWS if site.plan.fronts else 0.0)
        phases = catalog.during(ask.label, sent)
        states = {phase.state for phase in phases}
        if kind not in self._allowed(ask, states):
            return f"it got {kind or 'an answer'}, while the model was {sorted(states)}: {str(document)[:300]}"
        if kind:
            return ""
        if ask.version:
            document = json.loads(document["outputs"][0]["data"][0])
        if {name: document.get(name) for name in ("n", "v")} != {"n": ask.n, "v": answer_to(ask.n)}:
            return f"the answer is not its own: {document}"
        phases = catalog.during(
            ask.label, math.nextafter(sent, 0.0)
        )  # it may have come before a change of the same instant
        since = phases[0].since
        for origin, name in zip(document["from"], catalog.plan.parts(ask.name), strict=True):
            label, _, tag = origin.partition(":")
            served = phases if name == ask.name else catalog.during(name, since)
            right = label in {label_of(name, phase.version) for phase in served}
            if not (right and catalog.during(label, since)[0].tag <= int(tag) <= catalog.repository.tags[name]):
                return f"the answer is from {document['from']}, and the model was {served}"
        return ""

    def _fault_of_ready(self, ask: ModelAsk, kind: str) -> str:
        catalog = self._catalog
        states = {phase.state for phase in catalog.during(ask.label, ask.sent)}
        right = {"Overloaded"}
        died = not catalog.died.isdisjoint(catalog.plan.parts(ask.name))
        if self.site.draining or died or CHANGING in states or catalog.plan.on_demand:
            right |= {"", "ModelNotReady", "ModelNotFound"}
        if IN in states:
            right.add("")
        if OUT in states:
            right.add("ModelNotFound")
        return "" if kind in right else f"it got {kind or 'ready'}, while the model was {sorted(states)}"

    def fault_of_change(self, ask: ModelAsk, kind: str) -> str:
        """Return what is wrong with the end of a change; "" if it is right."""
        catalog, site = self._catalog, self.site
        if kind in ("Overloaded", "Draining") and (kind == "Overloaded" or site.draining):
            return ""
        own = ask.label, ask.kind
        made = [each for each in catalog.outcomes if each.at >= ask.sent and (each.name, each.kind) == own]
        errors = {{"SettingsError": "InvalidRequest"}.get(each.error, each.error) for each in made}
        if kind not in errors and kind != ask.wanted:
            return f"it got {kind or 'done'}, and what was done is {made}"
        parts = {ask.name, *catalog.plan.parts(ask.name)}
        reasons = {
            "": not ask.wanted,
            "ModelError": not catalog.failed_starts.isdisjoint(parts),
            "InvalidRequest": not catalog.repository.unreadable.isdisjoint(parts) or ask.wanted == kind,
            "ModelNotFound": ask.wanted == kind or ask.kind == _REMOVE or bool(ask.version),
            "Conflict": bool(catalog.plan.chains_of(ask.name)),
            "ModelNotReady": catalog.plan.on_demand,
        }
        return "" if reasons.get(kind) else f"it got {kind or 'done'} without a reason"


class _ControlCall:
    """A change or a look over gRPC. It is the listener of its SimulatedCall."""

    def __init__(self, client: ChangeClient, ask: ModelAsk) -> None:
        self._client, self._ask = client, ask
        self._messages = 0

    def begin(self, server: Any, peer: str) -> None:
        """Call the server."""
        ask = self._ask
        ask.sent = self._client.site.loop.now
        method = _METHODS[_OF_GRPC[ask.kind]]
        request = method.request()
        if ask.kind != _INDEX:
            request.model_name = ask.name
            if ask.wanted == "InvalidRequest":
                request.parameters["nonsense"].string_param = "1"
        call = self._call = server.call(peer, method.path, (), math.inf, self, math.inf)
        call.send(request.SerializeToString())
        call.half_close()

    def message(self, body: bytes) -> None:
        """See Listener."""
        self._messages += 1
        self._client.note(body)

    def ended(self, code: int, text: str, trailers: Pairs) -> None:
        """See Listener."""
        client, kind = self._client, dict(trailers).get(ERROR, "")
        client.note(b"%d" % code)
        client.site.responses[f"call {code}"] += 1
        cut = not kind and code in (UNAVAILABLE, CANCELLED) and (client.site.draining or self._call.was_cut)
        if not cut:
            if code != OK and CODES.get(kind) != code:
                client.broken(f"{self._ask.kind}: status {code} with {kind!r}: {text[:200]!r}")
            elif self._messages != (code == OK):
                client.broken(f"{self._ask.kind}: {self._messages} messages, status {code}")
            elif self._ask.kind != _INDEX and (fault := client.fault_of_change(self._ask, kind)):
                client.broken(f"{self._ask.kind} {self._ask.name}: {fault}: {text[:200]!r}")
        client.end()
