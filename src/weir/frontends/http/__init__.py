"""HTTP: a server whose fast path serves inference, and an ASGI application that serves everything, which any ASGI server can host."""
