"""Which models others are steps of: who must end first, and who must not end at all."""

from collections.abc import Iterable, Sequence

from weir.manager.chains.chain import Chain
from weir.manager.service import Service


def dependents(name: str, services: Iterable[Service]) -> list[Chain]:
    """Return the chains among `services` of which the model `name` is a step."""
    return [service for service in services if isinstance(service, Chain) and service.needs(name)]


def waves(services: Sequence[Service]) -> list[list[Service]]:
    """Return `services` such that a chain comes before its steps: those of one list may end at the same time."""
    left, found = list(services), []
    while left:
        first = [service for service in left if not dependents(service.name, left)] or left
        found.append(first)
        left = [service for service in left if service not in first]
    return found
