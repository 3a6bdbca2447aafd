"""The mark of tests that run a program in C of benchmarks/policies."""

import pytest
from benchmarks.policies.event_loop import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler: event_loop.c")
