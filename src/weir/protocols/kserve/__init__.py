"""The Open Inference Protocol (KServe v2) over HTTP, with the extensions that Triton's clients know.

protocol.py       what the head of an inference request says
protocol.py      body -> InferenceRequest: JSON, binary, raw; compressed; from shared memory
protocol.py     InferenceResponse -> body and headers; errors
context.py        what all routes share
endpoint.py    one route as an ASGI application: reads the body, writes the answer, whatever goes wrong
protocol.py       inference; streams.py: streams; routes.py: health, metadata, statistics; routes.py: what changes the server
routes.py      all of them as one ASGI application
hot.py         inference on the fast lane
"""
