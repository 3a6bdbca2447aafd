"""The parts, in the order of the report."""

from benchmarks.parts import (
    bodies,
    calls,
    decisions,
    embedding,
    overload,
    seed,
    slow_clients,
    solver,
    square,
    theory,
)
from benchmarks.result import Part

MODULES = (square, calls, seed, bodies, decisions, overload, slow_clients, solver, theory, embedding)
PARTS: dict[str, Part] = {module.PART.name: module.PART for module in MODULES}
