"""The public names of the text server, which text_server/ implements: texts in, vectors out.

with weir.embedding.serve("./bge-small-en", port=0) as server:
    print(server.url)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.text_server.server import EmbeddingServer, serve

__all__ = ["EmbeddingServer", "serve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'weir.embedding' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("weir.text_server.server"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
