"""Chains that a model's file describes: platform `ensemble`."""

from collections.abc import Mapping
from typing import Any

from weir.errors import SettingsError
from weir.manager.chains.chain import Chain
from weir.manager.chains.steps import Branch, Step, Steps, Switch
from weir.manager.repository.tensors import as_tensor, batch_said
from weir.manager.service import Service
from weir.manager.spec import ModelToServe
from weir.model import REQUIRED, Model

ENSEMBLE = "ensemble"


class EnsemblePlatform:
    """See Platform. The steps stand in the model's file; a version's folder has nothing to add."""

    def load(self, model: ModelToServe) -> type[Model] | type[Service]:
        """Return a Chain of the steps that the file says."""
        attributes = dict(model.attributes or {})
        if "steps" not in attributes:
            raise SettingsError(f"{model.label}: platform={ENSEMBLE!r}: must have [[steps]]")
        batch = batch_said(attributes) or REQUIRED
        attributes.pop("batch_dimension", None)
        if attributes.pop("decoupled", False):
            raise SettingsError(f"{model.label}: model_transaction_policy.decoupled: a chain gives one answer")
        for key in ("inputs", "outputs"):
            attributes[key] = tuple(
                as_tensor(table, batch, f"{model.label}: {key}") for table in attributes.get(key, ())
            )
        return type("Ensemble", (Chain,), attributes)


def read_steps(said: Any, source: str) -> Steps:
    """Return the steps in a file's tables. Raises SettingsError naming the step and its key."""
    if not isinstance(said, list) or not said:
        raise SettingsError(f"{source}: steps={said!r:.80}: must be a list of at least one table")
    return [_part(table, f"{source}: steps[{place}]") for place, table in enumerate(said)]


def _part(table: Any, source: str) -> Any:
    if isinstance(table, str):
        return Step(table)
    if not isinstance(table, Mapping):
        raise SettingsError(f"{source}={table!r:.80}: must be a table or a model's name")
    kinds = {"model": _step, "branch": _branch, "switch": _switch}
    named = [kind for kind in kinds if kind in table]
    if len(named) != 1:
        raise SettingsError(f"{source}: must have one of the keys {', '.join(kinds)}")
    return kinds[named[0]](table, source)


def _step(table: Mapping[str, Any], source: str) -> Step:
    _only(table, ("model", "version", "inputs", "outputs"), source)
    maps = [table.get(key, {}) for key in ("inputs", "outputs")]
    for said in maps:
        if not (isinstance(said, Mapping) and all(isinstance(name, str) for name in said.values())):
            raise SettingsError(f"{source}: {said!r:.80}: must be a table of names")
    if not isinstance(table["model"], str):
        raise SettingsError(f"{source}: model={table['model']!r:.80}: must be a name")
    return Step(table["model"], str(table.get("version", "")), *maps)


def _branch(table: Mapping[str, Any], source: str) -> Branch:
    _only(table, ("branch", "fail_fast"), source)
    fail_fast = table.get("fail_fast", True)
    if not isinstance(fail_fast, bool):
        raise SettingsError(f"{source}: fail_fast={fail_fast!r:.80}: must be true or false")
    return Branch(_paths(table["branch"], f"{source}.branch"), fail_fast)


def _switch(table: Mapping[str, Any], source: str) -> Switch:
    _only(table, ("switch", "cases", "default"), source)
    on = table["switch"]
    if not isinstance(on, str):
        raise SettingsError(f"{source}: switch={on!r:.80}: must be a key of the item, or the name of a tensor")
    cases = _paths(table.get("cases"), f"{source}.cases")
    default = read_steps(table["default"], f"{source}.default") if "default" in table else None
    # Keys of a table are text, values need not be: case 3 is meant by "3".
    numbers = {int(case): path for case, path in cases.items() if case.isascii() and case.isdigit()}
    return Switch(on, {**cases, **numbers}, default)


def _paths(said: Any, source: str) -> dict[str, Steps]:
    if not isinstance(said, Mapping) or not said:
        raise SettingsError(f"{source}={said!r:.80}: must be a table of lists of steps")
    return {name: read_steps(steps, f"{source}.{name}") for name, steps in said.items()}


def _only(table: Mapping[str, Any], keys: tuple[str, ...], source: str) -> None:
    for key in table:
        if key not in keys:
            raise SettingsError(f"{source}: {key}: there is no such key; there are {', '.join(keys)}")
