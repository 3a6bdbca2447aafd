"""A model without code of its own: its workers attach from outside."""

from typing import Any, ClassVar

from weir.errors import Unsupported
from weir.model import Model


class External(Model):
    """Serve this, or a subclass of it, for a model whose workers are programs of their own, in any language.

    They attach to the setting `worker_socket`, pull batches and leave as they like. Request bodies reach them as they came,
    and what they answer is the response. A subclass may say `content_types`, `measure`, `examples` and settings.
    """

    executor: ClassVar[str] = "external"

    def predict(self, batch: Any) -> Any:
        """Refuse: there is nothing here that could."""
        raise Unsupported(f"{type(self).__name__}: its workers attach from outside (executor=external)")

    def decode(self, body: bytes, content_type: str) -> Any:
        """Return the body as it is."""
        return body

    def encode(self, value: Any, content_type: str) -> bytes:
        """Return the answer as it is."""
        return bytes(value)
