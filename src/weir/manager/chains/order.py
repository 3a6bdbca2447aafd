"""Which models others are steps of: who must be there first, who must end first, and who must not end at all."""

from collections.abc import Collection, Iterable, Sequence

from weir.manager.chains.chain import Chain
from weir.manager.chains.steps import steps_in
from weir.manager.service import Service


def dependents(name: str, services: Iterable[Service], versions: Collection[str] | None = None) -> list[Chain]:
    """Return the chains among `services` of which the model `name` is a step; with `versions`, in one of these by its number."""
    return [service for service in services if isinstance(service, Chain) and service.needs(name, versions)]


def missing(services: Iterable[Service], there: Collection[str]) -> list[str]:
    """Return the models that are steps of chains among `services` and not `there`, each once."""
    chains = [service for service in services if isinstance(service, Chain)]
    names = [step.model for chain in chains for step in steps_in(chain.parts) if isinstance(step.model, str)]
    return [name for name in dict.fromkeys(names) if name not in there]


def waves(services: Sequence[Service]) -> list[list[Service]]:
    """Return `services` such that a chain comes before its steps: those of one list may end at the same time."""
    left, found = list(services), []
    while left:
        first = [service for service in left if not dependents(service.name, left)] or left
        found.append(first)
        left = [service for service in left if service not in first]
    return found
