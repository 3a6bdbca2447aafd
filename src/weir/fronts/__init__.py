"""Several front processes before one server, `weir serve --fronts K`: fronts read and write, the dispatcher queues and decides.

A *front* (front.py) is a process that listens, reads requests of the fast path and writes their responses. It knows models as a `RemoteHandle` (remote.py),
which sends requests to the *dispatcher* (dispatcher.py), the server itself, over a link (messages.py). Whatever else arrives, a front hands
over to the dispatcher, descriptor and all (passing.py).
"""
