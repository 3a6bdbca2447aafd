"""HTTP: a server whose fast path answers inference, and an ASGI application that answers everything, which any ASGI server can host."""
