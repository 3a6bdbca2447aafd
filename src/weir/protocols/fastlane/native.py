"""Weir's own protocol on the fast path."""

from weir.model import is_tensor_model
from weir.protocols.fastlane.head import Head
from weir.protocols.fastlane.plan import RoutePlan
from weir.protocols.fastlane.request import HttpRequest
from weir.protocols.native import NativeProtocol, RequestHead
from weir.serving.inference import empty_body, may_be_empty


class HotNative(NativeProtocol):
    """The RouteHandler of /infer, /inference and the models' own routes; see plan.py."""

    request = HttpRequest
    of_service = True

    def complete(self, plan: RoutePlan, head: Head, path: str) -> bool:
        """See RouteHandler."""
        ask = self.read_head(head.method, path, head.headers)
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


def _is_hot(ask: RequestHead) -> bool:
    """Lists, tensors, compressed bodies and what is not one entry of the queue are read by the ASGI application; it writes streams too."""
    service = ask.service
    return (
        not (ask.batch or ask.stream or ask.coding or is_tensor_model(service.model)) and service.inference.queues_items
    )
