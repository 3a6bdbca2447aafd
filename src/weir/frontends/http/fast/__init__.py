"""The fast path of HTTP: inference requests framed by Content-Length, read and answered without a task, a future or an ASGI scope.

plan.py        parses a head with llhttp, refuses ambiguous ones, and decides what answers the request: a route handler, or uvicorn
shared.py      what all connections of a server share: receive buffer, head cache, date, byte counters, memory for large bodies
connection.py  one connection, with one request in flight: reads heads and bodies, writes responses, and stops a client that does not read them
inference.py   requests of Weir's own protocol, and of the Open Inference Protocol in JSON or with binary tensors
handover.py    passes a connection on to uvicorn and the ASGI application, with the bytes read so far
"""
