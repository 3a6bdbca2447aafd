"""What a server says of a model over HTTP: what to send, and what it has counted."""

from typing import Any
from urllib.parse import quote

from weir.bench.batches import Counts, read_counts
from weir.bench.targets.dialling import Dialler
from weir.bench.targets.doors import Door
from weir.bench.targets.fetching import fetch, fetch_json, request_bytes
from weir.bench.targets.tensors import declared_inputs, made_request
from weir.wire.inference import InferenceRequest


async def example_request(dialler: Dialler, door: Door, rows: int, patience: float) -> InferenceRequest:
    """Return a request that the model takes. Raises SettingsError where that cannot be known."""
    inputs = declared_inputs(door.model, await fetch_json(dialler, f"/v2/models/{quote(door.model)}", patience))
    example = None
    if inputs[0].datatype == "BYTES":  # a Weir may describe an item
        example = example_of(await fetch_json(dialler, "/openapi.json", patience), f"/infer/{door.model}")
    return made_request(door, inputs, rows, example)


async def is_counted(dialler: Dialler, model: str, patience: float) -> bool:
    """Tell whether the server is a Weir with a model of this name."""
    index = await fetch_json(dialler, "/", patience)
    try:
        return model in [each["name"] for each in index["models"]]
    except (KeyError, TypeError):
        return False


async def counted(dialler: Dialler, model: str, patience: float) -> Counts | None:
    """Return what the server's /metrics say of the model; None where there are none."""
    answer = await fetch(dialler, request_bytes("GET", dialler.address.at("/metrics"), {}), patience)
    return read_counts(answer.body.decode(), model) if answer.status == 200 else None


def example_of(document: Any, path: str) -> Any:
    """Return the first example of a body for `path` in an OpenAPI document; None if there is none."""
    try:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        return next(iter(body["examples"].values()))["value"]
    except (KeyError, TypeError, StopIteration, AttributeError):
        return None
