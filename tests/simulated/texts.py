"""Texts in the simulated server: a model whose vectors say of which text they are, the real encoder and endpoints of texts, and their clients."""

import base64
import json
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.simulated.asking import ANYTIME, CODE_OF, Ask, http, wanted_of
from tests.simulated.clients import Client
from tests.simulated.models import ASKED, CODES, RAISED, STATUS, answer_to, happen
from tests.text_server.text_models import Words

from weir.errors import Draining, InvalidRequest, WeirError
from weir.frontends.http.application import AddedEndpoints
from weir.messages import JSON
from weir.model import Measure, Model
from weir.protocols.access import Control
from weir.protocols.account import Account
from weir.text_models.model import TextEncoder
from weir.text_models.texts import Tokenized, Tokens
from weir.text_server.bert_as_service.http import Status
from weir.text_server.bert_as_service.zeromq import ZeroMqFrontend
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.exchange import EmbeddingContext
from weir.text_server.fronts import TextsInFronts, add_counted
from weir.text_server.http import FastTexts
from weir.text_server.metrics import TextClients, TextCounts
from weir.text_server.protocols import text_apis
from weir.text_server.requests import SMALL_REQUEST, EncodeRequest
from weir.text_server.server_settings import ZeroMqSettings
from weir.text_server.tokenizing import TokenizerThreads

if TYPE_CHECKING:
    from tests.simulated.world import World

    from weir.protocols import HttpSettings
    from weir.serving.handle import ModelHandle

NAME = "texts"
FIRST_TEXT = 1_500_000_000  # no other client has numbers from here on, and they are token ids
LONGEST = 64  # tokens of a text; what is longer is cut
MOST_TEXTS = 50  # of one request
_MODULUS = 9973  # numbers of a vector are below it, and so exact as float32

# How each protocol shows an error, by its name; the rest is as `*`. This is not read from Weir: it is what Weir promises.
_OPENAI_CODES = {
    "ModelNotFound": "model_not_found", "MethodNotAllowed": "method_not_allowed", "Overloaded": "rate_limit_exceeded",
    "Unauthorized": "invalid_api_key", "TooLarge": "request_too_large", "Unsupported": "unsupported", "ModelNotReady": "service_unavailable",
    "Draining": "service_unavailable", "WorkerLost": "service_unavailable", "DeadlineExceeded": "timeout",
}  # fmt: skip
_OF_SERVER = ("DeadlineExceeded", "Cancelled", "ModelNotReady", "Draining", "WorkerLost", "ModelError", "ModelCrashed")
_EMPTY = "Empty"  # an error that only TEI tells from other invalid requests
_TEI_CODES = {
    _EMPTY: (400, "Empty"),
    "ModelError": (424, "Backend"), "ModelCrashed": (424, "Backend"), "InvalidRequest": (422, "Validation"), "Overloaded": (429, "Overloaded"),
    "DeadlineExceeded": (504, "Backend"), "Cancelled": (499, "Backend"), "ModelNotReady": (503, "Unhealthy"), "Draining": (503, "Unhealthy"),
    "WorkerLost": (503, "Unhealthy"),
}  # fmt: skip


def shown(api: str, kind: str) -> tuple[Any, ...]:
    """Return how an error is shown in the answers of `api`."""
    if api == "tei":
        return _TEI_CODES.get(kind) or (STATUS[kind], "Validation")
    own = "requests" if kind == "Overloaded" else "server_error" if kind in _OF_SERVER else "invalid_request_error"
    return STATUS[kind], own, _OPENAI_CODES.get(kind)


def vector_of(ids: Sequence[int]) -> list[float]:
    """Return the vector of a text with these tokens."""
    kept = ids[:LONGEST]
    return [float(len(kept)), *(float(each % _MODULUS) for each in (kept[0], sum(kept), answer_to(kept[0])))]


class Numbers(Words):
    """A tokenizer of texts whose words are numbers, which are their tokens."""

    def _one(self, text: Any, max_length: int, truncate: bool) -> Tokenized | InvalidRequest:
        ids = [int(word) for word in (text.split() if isinstance(text, str) else text)]
        if len(ids) > max_length and not truncate:
            return InvalidRequest(f"{len(ids)} tokens: must be at most {max_length}")
        return Tokenized(np.array(ids[:max_length], "<i4").tobytes(), 0, len(ids) > max_length)


class Vectors(Model):
    """A vector for each text. The second token of a text says what shall happen."""

    padded = True
    content_types = (JSON,)
    encode = TextEncoder.encode

    def predict(self, batch: list[Tokens | bytes]) -> list[Any]:
        texts = [np.frombuffer(item if isinstance(item, bytes) else item[0], "<i4").tolist() for item in batch]
        for text in texts:
            happen(CODES[text[1]])
        return [np.array(vector_of(text), np.float32) for text in texts]

    @classmethod
    def measure(cls, item: Tokens) -> Measure:
        """A text's cost is its length."""
        return Measure(cost=len(item.ids) / 4)


class _ServedVectors:
    """What stands for a ServedTextModel."""

    name = NAME
    has_small_responses = True

    def __init__(self, knows_words: bool, cut_off: Callable[[float], None]) -> None:
        self._knows_words = knows_words
        self._cut_off = cut_off

    def encoder(self, service: "ModelHandle", _: Any, fronts: int) -> Encoder:
        """Return an encoder, one of so many `fronts`."""
        words = Numbers()
        words.knows_all = self._knows_words
        shape = TextShape(4, LONGEST, normalize=False)
        made = WatchedEncoder(service, TokenizerThreads(words, 0), shape, name=NAME, fronts=fronts)
        made.cut_off = self._cut_off
        return made


class WatchedEncoder(Encoder):
    """An encoder that calls `cut_off` with the beginning of a request that it has accepted, and that fails because the server drains."""

    cut_off: Callable[[float], None]

    def _fail(self, request: EncodeRequest, error: WeirError) -> None:
        if isinstance(error, Draining) and ASKED not in error.message and not request.ended:
            self.cut_off(request.deadline.began)
        super()._fail(request, error)


class SimulatedTexts:
    """The endpoints of texts in a simulated server, and its encoder of `service`."""

    def __init__(
        self, service: "ModelHandle", settings: "HttpSettings", *, knows_words: bool, cut_off: Callable[[float], None]
    ) -> None:
        self._model = _ServedVectors(knows_words, cut_off)
        self.encoder = self._model.encoder(service, None, 1)
        self._clients = TextClients()
        self.counts = TextCounts(self._clients)
        self._context = EmbeddingContext({NAME: self.encoder}, settings, MOST_TEXTS, self.counts, self._clients)
        self._apis = text_apis(self._context)
        self._zeromq: list[ZeroMqFrontend] = []

    def in_fronts(self) -> TextsInFronts:
        """Return its part in a front."""
        made = TextsInFronts([], {}, MOST_TEXTS)
        models: Any = [self._model]
        made._models = models
        return made

    def zeromq(
        self, settings: dict[str, Any], control: Control, account: Account, clock: Callable[[], float]
    ) -> list[ZeroMqFrontend]:
        """Return its frontend for ZeroMQ, if there are settings of one."""
        status = Status({NAME: self.encoder}, self._clients)
        parts: dict[str, Any] = {"control": control, "status": status, "account": account, "terminate": lambda: None}
        if settings:
            self._zeromq.append(ZeroMqFrontend(self._context, ZeroMqSettings(**settings), clock=clock, **parts))
        return self._zeromq

    # It is the DispatcherProduct of several fronts.

    def turns(self, handle: "ModelHandle") -> Encoder | None:
        """See DispatcherProduct."""
        return self.encoder if handle.facts.name == NAME else None

    def reported(self, data: bytes) -> None:
        """See DispatcherProduct."""
        add_counted(data, self.counts, self._clients)

    @property
    def added(self) -> AddedEndpoints:
        """What it adds to HTTP."""
        return AddedEndpoints([each for api in self._apis for each in api.endpoints()])

    @property
    def routes(self) -> list[FastTexts]:
        """Its handlers for the fast path."""
        return [FastTexts(api.texts, {NAME}) for api in self._apis]

    @property
    def answered(self) -> int:
        """How many requests have been answered with vectors, by the counts of the whole server."""
        return sum(calls for calls, _, _ in self.counts._answered.values())

    def left(self) -> dict[str, int]:
        """Return what is left of requests for vectors."""
        left = left_in(self.encoder)
        for each in self._zeromq:
            handler, publisher = each._handler, each._publisher
            left |= {
                "peers": len(each._in.peers) + len(each._out.peers), "bytes of messages": each._in.held + each._out.held,
                "requests over ZeroMQ": handler.in_flight + len(handler._calls), "responses that are kept": publisher._kept_bytes,
                "responses without room": len(publisher._waiting) + len(+publisher._reserved), "subscriptions": len(publisher._peers),
            }  # fmt: skip
        return left


def left_in(encoder: Encoder) -> dict[str, int]:
    """Return what is left of requests for vectors in an encoder."""
    callers = encoder._callers
    return {
        "texts that are held": encoder._held,
        "texts in flight": sum(encoder._under_way.values()),
        "requests for vectors": encoder._open_requests._count,
        "callers with texts": len(callers),
        "turns that are kept": callers._held + len(callers._tags) - sum(callers._ended.values()),
    }


class Question:
    """What was asked for: the vectors of texts, by their tokens."""

    def __init__(self, api: str, texts: list[list[int]], packed: bool) -> None:
        self._api = api
        self._texts = texts
        self._packed = packed

    def fault_of(self, ask: Ask, status: int, headers: dict[str, str], body: bytes, also: frozenset[str]) -> str:
        """Return what is wrong with this response; "" if it is right."""
        try:
            found = json.loads(body)
            if status == 200:
                return self._fault_of_answer(ask, found)
            return self._fault_of_error(ask, status, found, also)
        except (ValueError, KeyError, TypeError) as failure:
            return f"status {status} with a body of another form ({failure!r}): {body[:200]!r}"

    def _fault_of_answer(self, ask: Ask, found: Any) -> str:
        if ask.wanted:
            return f"it got an answer, must get {ask.wanted}: {str(found)[:200]}"
        vectors = found
        if self._api == "openai":
            if [each["index"] for each in found["data"]] != list(range(len(self._texts))):
                return f"the vectors are not in order: {str(found)[:300]}"
            vectors = [each["embedding"] for each in found["data"]]
            tokens = sum(min(len(text), LONGEST) for text in self._texts)
            if found["usage"]["prompt_tokens"] != tokens:
                return f"the answer counts {found['usage']} tokens, must count {tokens}"
        if self._packed:
            vectors = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in vectors]
        right = [vector_of(text) for text in self._texts]
        return "" if vectors == right else f"the vectors are not its own: {vectors[:3]}, must be {right[:3]}"

    def _fault_of_error(self, ask: Ask, status: int, found: Any, also: frozenset[str]) -> str:
        if not ask.named and status in [STATUS[kind] for kind in ANYTIME]:
            return ""  # its path had not arrived: what had may be that of another protocol
        has: tuple[Any, ...] = (
            (status, found["error_type"])
            if self._api == "tei"
            else (status, found["error"]["type"], found["error"]["code"])
        )
        if not has[1] and status == 503:
            return ""
        may = {*ask.extra, *also, *([ask.wanted] if ask.wanted else [])}
        right = has in [shown(self._api, kind) for kind in may]
        return "" if right else f"it got {has}, must get {ask.wanted or 'its answer'}: {str(found)[:300]}"


_WRONG_INPUTS: tuple[Any, ...] = ([], 5, {"a": 1}, [5.5], [None])


_MOST_WORDS = 10_000
_WORDS = [7919 * word % _MOST_WORDS for word in range(_MOST_WORDS + 100)]  # each of them, in no order


def draw_text(draw: random.Random, n: int, faults: float, *, small: bool) -> list[int]:
    """Return the tokens of a text with the number `n`."""
    do = draw.choice((*RAISED, "crash", "hang")) if draw.random() < faults else "ok"
    fillers = 0 if small else draw.choice((0, 1, 5, 30, 100))
    return [n, CODE_OF.get(do, 0), *(_WORDS[(at := draw.randrange(_MOST_WORDS)) : at + fillers] if fillers else ())]


def draw_texts(draw: random.Random, n: int, *, faults: float, timeout: float, small: bool) -> Ask:
    """Return a request for the vectors of texts. The first of them has the number `n`."""
    count = 1 if small or draw.random() < 0.5 else draw.choice((2, 3, 10, 33, MOST_TEXTS))
    texts = [draw_text(draw, n + place, faults / count, small=small) for place in range(count)]
    if count > 1 and draw.random() < 0.2:  # equal texts are computed once
        texts[-1] = texts[0]
    errors = {wanted_of(CODES[text[1]]) for text in texts if text[1]}
    as_ids = draw.random() < 0.2
    listed: list[Any] = texts if as_ids else [" ".join(map(str, text)) for text in texts]
    sent: Any = listed[0] if count == 1 and draw.random() < 0.7 else listed
    api = draw.choice(("openai", "openai", "tei"))
    packed = api == "openai" and draw.random() < 0.3
    document: dict[str, Any] = {"inputs": sent, "normalize": False}
    if api == "openai":
        document = {"input": sent, "model": NAME} | ({"encoding_format": "base64"} if packed else {})
    wanted, extra = (min(errors) if errors else ""), frozenset(errors)
    if draw.random() < faults / 3:
        wanted, extra = _damage(draw, document, api), frozenset()
    headers: tuple[str, ...] = ()
    limit = timeout * max(1.0, count / SMALL_REQUEST)
    if draw.random() < 0.1:
        limit = draw.choice((0.001, 0.02, 0.1, 0.5))
        headers = (f"X-Request-Timeout: {limit}",)
    if draw.random() < 0.1:
        headers += ("X-Client-Id: somebody",)
    data = http({"openai": "/v1/embeddings", "tei": "/embed"}[api], json.dumps(document).encode(), headers)
    return Ask(n, data, False, count, limit, wanted, extra=extra, judged_by=Question(api, texts, packed))


def _damage(draw: random.Random, document: dict[str, Any], api: str) -> str:
    """Make `document` wrong, and return the error that it must have."""
    field = "input" if api == "openai" else "inputs"
    kind = draw.choice(("model", "input", "dimensions", "missing"))
    if kind == "model":
        document["model"] = "nothing"
        return "ModelNotFound"
    if kind == "input":
        document[field] = draw.choice(_WRONG_INPUTS)
        if document[field] == [] and api == "tei":
            return _EMPTY
    elif kind == "missing":
        del document[field]
    else:
        document["dimensions"] = draw.choice((-1, 5, "many"))
    return "InvalidRequest"


class TextClient(Client):
    """Asks for the vectors of texts, in all the ways in which clients of HTTP send, read and leave."""

    def __init__(self, site: "World", index: int) -> None:
        super().__init__(site, index)
        self._number = FIRST_TEXT + index % 1000 * 1_000_000

    def ask(self, *, small: bool, long: bool) -> Ask:
        """See Client."""
        plan = self.site.plan
        return draw_texts(self.draw, self.number(), faults=plan.wrong, timeout=plan.timeout, small=small)
