"""The hot HTTP path: inference requests framed by Content-Length, read and answered without task, future or ASGI scope.

plan.py             bytes of a head -> Head, by llhttp; refuses what is ambiguous
shared.py       exact bytes of a head -> what they mean, for heads that come again
plan.py             Head -> Plan: whose request it is, how it is answered, or that it is not for the fast lane
shared.py           what all connections of a server share: buffer, head cache, date, byte counters
connection.py       one connection: reads heads and bodies, one request in flight
shared.py             where a large body is received: a block of the arena or a buffer
request.py          the request that the batcher knows; its `finish` and `fail` write the answer
shared.py        heads of answers as bytes
connection.py  a connection that was refused and whose remaining bytes are thrown away
handover.py         a connection that goes on under uvicorn, with the ASGI application
"""
