"""HTTP: a server whose fast path answers inference, and an ASGI application for everything, which any ASGI server can host."""
