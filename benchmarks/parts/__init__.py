"""The parts, in the order of the report."""

from benchmarks.parts import (
    agreement,
    bodies,
    calls,
    crowd,
    decisions,
    doors,
    embedding,
    graphs,
    grpc_calls,
    kserve,
    overload,
    padding,
    seed,
    simulation,
    slow_clients,
    solver,
    square,
    text_memory,
    theory,
    vectors,
)
from benchmarks.result import Part

MODULES = (
    square,
    calls,
    seed,
    bodies,
    decisions,
    overload,
    slow_clients,
    solver,
    simulation,
    theory,
    embedding,
    padding,
    graphs,
    kserve,
    grpc_calls,
    doors,
    vectors,
    agreement,
    text_memory,
    crowd,
)
PARTS: dict[str, Part] = {module.PART.name: module.PART for module in MODULES}
