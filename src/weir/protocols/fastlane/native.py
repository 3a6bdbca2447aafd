"""Weir's own HTTP meaning on the fast lane."""

from typing import TYPE_CHECKING

from weir.errors import WeirError
from weir.model import is_tensor_model
from weir.protocols.fastlane.head import Head
from weir.protocols.fastlane.plan import RoutePlan
from weir.protocols.fastlane.request import HttpRequest
from weir.protocols.native import RequestHead, find_service, read_ask
from weir.protocols.payloads import empty_body, may_be_empty
from weir.protocols.response import HttpResponse, error_answer
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.serving.service import Service


class Native:
    """The RouteHandler of /infer, /inference and the models' own routes; see plan.py."""

    request = HttpRequest
    of_service = True
    prefix = b"/"

    def __init__(self, registry: "Registry", settings: HttpSettings) -> None:
        self._registry = registry
        self._settings = settings

    def complete(self, plan: RoutePlan, head: Head, path: str) -> bool:
        """See RouteHandler."""
        ask = read_ask(self._registry, self._settings, head.method, path, head.headers)
        if ask is None:
            return False
        if not head.length:
            if may_be_empty(ask):
                return False
            raise empty_body(ask)
        if not _is_hot(ask):
            return False
        plan.ask = ask
        plan.answer_type = ask.accept
        plan.in_arena = ask.plain
        return True

    def named(self, path: str) -> "Service | None":
        """See RouteHandler."""
        try:
            found = find_service(self._registry, path)
        except WeirError:
            return None
        return found[0] if found else None

    def error_answer(self, error: BaseException, service: "Service | None") -> HttpResponse:
        """See RouteHandler."""
        return error_answer(error, service.name if service else None, development=self._settings.development)


def _is_hot(ask: RequestHead) -> bool:
    """Lists, tensors and compressed bodies are made into work by the ASGI application; it writes streams, and asks deputies."""
    service = ask.service
    return not (ask.batch or ask.stream or ask.coding or service.deputy is not None or is_tensor_model(service.model))
