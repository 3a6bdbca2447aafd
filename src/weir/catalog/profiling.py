"""Profiles a model as a service of it would run it: the same settings, the same workers, one of them."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from weir.catalog.chains import chain_of
from weir.catalog.loading import load_target
from weir.errors import SettingsError
from weir.model import Model
from weir.policy.cost.profile import Profile
from weir.profiling.items import Items, items_of, read_items
from weir.profiling.machine import Meters, describe_machine, find_meters
from weir.profiling.measure import Progress, grid, measure
from weir.profiling.measuring import Measuring
from weir.profiling.settings import ProfilingSettings
from weir.serving.service import Service

Target = str | type[Model] | type[Service]

# What a service is measured with, whatever else it is told: a profile is of one worker, and of no policy, which may itself wait
# for this profile.
MEASURED_WITH = {"workers": 1, "policy": "greedy"}

_OWN = {declared.name for declared in fields(ProfilingSettings)}


def profile(
    model: Target, *, params: dict[str, Any] | None = None, items: Iterable[Any] | str | Path | None = None,
    progress: Progress = lambda share, what: None, **settings: Any,
) -> Profile:  # fmt: skip
    """Measure `model` (a class, or a text like "module:Class") and return its profile.

    `items` are what batches are made of, or the path of a file of them (see profiling/items.py); without, the model's
    examples. `settings` are those of a measurement (`sizes`, `seconds`, `confidence`, `power`, `seed`) and those of Service, which should
    be what will serve: `max_batch_size`, `pipeline_depth`, `spin`, `executor`, `threads` and so on. One worker is measured, whatever
    `workers` says, for a profile is of one. `progress` is told the share that is done and what is being done.

    Also works where an event loop is running already (a notebook), which waits meanwhile.
    Raises SettingsError for what cannot be run or measured, and ModelError when the model fails.
    """
    own = ProfilingSettings(**{name: settings.pop(name) for name in _OWN & settings.keys()})
    found = load_target(model) if isinstance(model, str) else model
    settings |= MEASURED_WITH
    if issubclass(found, Service):
        service = found(params=params, **settings)
    else:
        service = Service(found, params=params, **settings)
    return profile_service(service, own, items=items, progress=progress)


def profile_service(
    service: Service, settings: ProfilingSettings, *, items: Iterable[Any] | str | Path | None = None,
    about: Mapping[str, Any] | None = None, progress: Progress = lambda share, what: None,
) -> Profile:  # fmt: skip
    """Measure the first worker of `service`, which has not been started, and return its profile. See `profile`."""
    if chain_of(service) is not None:
        raise SettingsError(
            f"{service.label}: is a chain, which computes nothing itself: measure the models of its steps"
        )
    values = read_items(Path(items)) if isinstance(items, (str, Path)) else items
    chosen = items_of(service.model, values, seed=settings.seed)
    grid(service.batching.max_batch_size, settings.sizes)  # refuses sizes before anything is started
    facts = {**describe_service(service), **(about or {})}

    async def run() -> Profile:
        return await _measured(service, settings, chosen, facts, progress)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(run)
    with ThreadPoolExecutor(1, "weir-profile") as threads:
        return threads.submit(_run, run).result()


def describe_service(service: Service) -> dict[str, Any]:
    """Return what a profile says of where it was made, and of what."""
    kind = service.model
    workers = service.workers
    return {
        "model": f"{kind.__module__}:{kind.__qualname__}",
        **describe_machine(),
        "executor": workers.executor,
        "spin": workers.spin,
        **({} if workers.threads is None else {"threads": workers.threads}),
    }


def worker_environment(service: Service) -> dict[str, str]:
    """Return the environment of the service's first worker."""
    return {**os.environ, **(service.workers.env[0] if service.workers.env else {})}


async def _measured(
    service: Service, settings: ProfilingSettings, items: Items, about: Mapping[str, Any], progress: Progress
) -> Profile:
    meters = find_meters(worker_environment(service)) if settings.power is None else Meters([], "")
    progress(0.0, "loading")
    measuring = Measuring(service.executor)
    try:
        await service.executor.start(measuring)
        return await measure(
            measuring, items, service.batching.max_batch_size, settings,
            pipeline_depth=service.workers.pipeline_depth, meters=meters.found, no_meters=meters.missing, about=about,
            progress=progress,
        )  # fmt: skip
    finally:
        await service.executor.stop()


def _run(main: Any) -> Profile:
    import uvloop  # the loop that serves

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        profile: Profile = runner.run(main())
        return profile
