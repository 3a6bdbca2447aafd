"""Small calls for vectors on the fast lane: one task for each, and no ASGI between it and its connection.

What a head or a body wants beyond a few short texts is for the ASGI application, which gets the connection then.
"""

import asyncio
import logging
from collections.abc import Container
from contextvars import Context
from typing import TYPE_CHECKING, Any

from weir.embedding.calling import Caller, EmbeddingContext, TextCall
from weir.embedding.encoder import SMALL
from weir.errors import Cancelled, WeirError
from weir.protocols.endpoint import identified
from weir.protocols.response import HttpResponse, echo_headers
from weir.wire.pickles import LARGE_BYTES

if TYPE_CHECKING:
    from weir.protocols.fastlane.connection import Connection
    from weir.protocols.fastlane.head import Head
    from weir.protocols.fastlane.plan import RoutePlan
    from weir.serving.service import Service

_log = logging.getLogger("weir.http")


class HotTexts:
    """The RouteHandler of the calls of `kind`; see fastlane/plan.py. `models` have one vector for each text, so that no answer is large."""

    of_service = False

    def __init__(self, site: EmbeddingContext, kind: type[TextCall], models: Container[str]) -> None:
        self.site = site
        self.kind = kind
        self.models = models
        self.prefix = kind.path.encode()
        self._longest = min(LARGE_BYTES, site.http.max_body_size)

    def request(self, connection: "Connection", plan: "RoutePlan", payload: Any) -> "HotCall":
        """See RouteHandler."""
        return HotCall(self, connection, plan, payload)

    def complete(self, plan: "RoutePlan", head: "Head", path: str) -> bool:
        """See RouteHandler. What is wrong with a head the ASGI application says."""
        if path != self.kind.path or not 0 < head.length <= self._longest or plan.expects_continue:
            return False
        try:
            caller = Caller(head.headers)
        except WeirError:
            return False
        if caller.wishes.coding:
            return False
        plan.ask = (caller, head.headers)
        return True

    def named(self, path: str) -> "Service | None":
        """See RouteHandler: the body names the model."""
        return None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """See RouteHandler."""
        return self.kind.refusal(self.site, error)


class HotCall:
    """One call on `connection`."""

    __slots__ = ("_call", "_caller", "_connection", "_manner", "_plan", "_task", "payload")

    def __init__(self, manner: HotTexts, connection: "Connection", plan: "RoutePlan", payload: bytes) -> None:
        self.payload = payload
        self._manner = manner
        self._connection = connection
        self._plan = plan
        self._caller, headers = plan.ask
        self._call = manner.kind(manner.site, headers, _peer(connection), payload, caller=self._caller)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """See HotRequest."""
        call = self._call
        try:
            call.read()
        except WeirError as error:
            return self._refuse(error)
        if len(call.texts) > SMALL or call.model not in self._manner.models:
            return self._connection.hand_over(self._plan, self.payload)
        # A context of its own: what is current in that of a call before, whose answer made room for this, is not of this one.
        self._task = asyncio.get_running_loop().create_task(self._answered(), context=Context())

    async def _answered(self) -> None:
        call = self._call
        try:
            answer = await call.encoded()
            assert answer is not None  # that of a small call is never sent bit by bit
        except Cancelled:
            return self._connection.abort()
        except WeirError as error:
            answer = call.refused(error)
        except Exception as error:
            _log.exception("POST %s failed", call.path)
            answer = call.refused(error)
        self._connection.answer(self._plan, identified(answer, call.headers))

    def fail(self, error: Exception) -> None:
        """See HotRequest."""
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        answer = self._call.refused(error)
        answer.headers.extend(echo_headers(self._caller.wishes))
        self._connection.answer(self._plan, answer)

    def leave(self) -> None:
        """See HotRequest."""
        if self._task is not None:
            self._task.cancel()


def _peer(connection: "Connection") -> str | None:
    host = connection.transport.get_extra_info("peername")
    return host[0] if isinstance(host, tuple) else None
