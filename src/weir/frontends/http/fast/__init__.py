"""The fast path of HTTP: inference requests framed by Content-Length, read and answered without a task, a future or an ASGI scope.

plan.py             reads the bytes of a head with llhttp, refuses what is ambiguous, and decides who answers it: a route handler, or uvicorn
shared.py           what all connections of a server share: receive buffer, head cache, date, byte counters, places for large bodies
connection.py       one connection: reads heads and bodies, one request in flight
native.py           a request of Weir's own protocol, whose `finish` and `fail` write the answer
kserve.py           a request of the Open Inference Protocol, in JSON or with binary tensors
response_writer.py  writes answers and parts of them, and holds back a connection whose caller does not read
handover.py         passes a connection on to uvicorn and the ASGI application, with the bytes read so far
"""
