"""The paper recomputed: its table, its figures, and every claim it makes, held against our own computation.

Xu, Sun, Zhou, Niu: SMDP-based dynamic batching for efficient inference on GPU-based platforms, arXiv 2301.12865.
It runs from a checkout, by `make reproduce`, and is no part of the wheel.
"""
