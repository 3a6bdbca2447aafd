"""The Open Inference Protocol (KServe v2) over HTTP, with the extensions that Triton's clients know.

heads.py       what the head of an inference request says
bodies.py      body -> InferenceRequest: JSON, binary, raw; compressed; from shared memory
replies.py     InferenceResponse -> body and headers; errors
site.py        what all routes share
endpoint.py    one route as an ASGI application: reads the body, writes the answer, whatever goes wrong
infer.py       inference; streams.py: streams; pages.py: health, metadata, statistics; control.py: what changes the server
routes.py      all of them as one ASGI application
hot.py         inference on the fast lane
"""
