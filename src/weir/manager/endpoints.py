"""The endpoints that `load_worker` has made: a model and the parameters that it runs with."""

import json
from collections import Counter
from collections.abc import Container, Mapping
from itertools import count
from typing import NamedTuple

from weir.manager.spec import Parameters


class Endpoint(NamedTuple):
    """`model` is the name that was asked for, `parameters` what was said, but for `share`."""

    model: str
    parameters: Parameters


class Endpoints:
    """Endpoints by name. A model that runs without having been loaded as a worker has one of its own name, with no
    parameters."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._added: Counter[str] = Counter()

    def find(self, name: str) -> Endpoint | None:
        """Return the endpoint of that name."""
        return self._endpoints.get(name)

    def of(self, model: str, parameters: Parameters, running: Container[str]) -> str | None:
        """Return the endpoint where `model` runs with these parameters."""
        asked = _text(parameters)
        for name, endpoint in self._endpoints.items():
            if endpoint.model == model and _text(endpoint.parameters) == asked:
                return name
        return model if not parameters and model in running and model not in self._endpoints else None

    def new_name(self, model: str, running: Container[str], known: Container[str]) -> str:
        """Return the name of a new endpoint of `model`: its own, if nothing runs under it, or else the first with a number that
        is neither running nor the name of another model."""
        if model not in running:
            return model
        names = (f"{model}-{number}" for number in count(1))
        return next(name for name in names if name not in running and name not in known)

    def add(self, name: str, model: str, parameters: Parameters) -> None:
        """`model` runs with these parameters under `name`."""
        self._endpoints[name] = Endpoint(model, parameters)

    def remove(self, name: str) -> None:
        """Nothing runs under `name` any more."""
        self._endpoints.pop(name, None)
        self._added.pop(name, None)

    def resized(self, name: str, by: int) -> None:
        """The endpoint `name` has so many more workers, or fewer; not fewer than it was started with, as far as is noted here."""
        self._added[name] = max(0, self._added[name] + by)

    def added(self, name: str) -> int:
        """Return how many workers `name` has been given beyond those that it was started with."""
        return self._added[name]


def _text(parameters: Mapping[str, object]) -> str:
    return json.dumps(dict(parameters), sort_keys=True)
