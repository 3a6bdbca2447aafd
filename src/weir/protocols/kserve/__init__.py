"""The Open Inference Protocol (KServe v2), with the extensions that Triton's clients know.

context.py   what all frontends of the protocol share
metadata.py  all documents that are not inference: metadata, statistics, loading and unloading
protocol.py  inference over HTTP: reads requests and writes responses

Sources: the Open Inference Protocol (https://github.com/kserve/open-inference-protocol) and
the extensions in https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""
