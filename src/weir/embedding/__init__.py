"""The public names of the text server, which text_server/ implements: texts in, vectors out.

with weir.embedding.serve("./bge-small-en", port=0) as server:
    print(server.url)
"""

from weir.text_server.server import EmbeddingServer, serve

__all__ = ["EmbeddingServer", "serve"]
