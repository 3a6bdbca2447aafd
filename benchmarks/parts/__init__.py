"""The parts, in the order of the report."""

from benchmarks.parts import bodies, calls, decisions, overload, seed, slow_clients, solver, square
from benchmarks.result import Part

PARTS: dict[str, Part] = {
    module.PART.name: module.PART for module in (square, calls, seed, bodies, decisions, overload, slow_clients, solver)
}
