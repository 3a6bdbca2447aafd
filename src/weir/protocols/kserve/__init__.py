"""The Open Inference Protocol (KServe v2), with the extensions that Triton's clients know.

context.py   what every frontend of the protocol shares
metadata.py  the documents beside inference: what is shown of a server and its models, and what calls that change them say
protocol.py  inference over HTTP: how requests are read and answers written
"""
