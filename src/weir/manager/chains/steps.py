"""What a chain is made of: steps one after the other, branches side by side, and switches by value."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.manager.service import Service


class Step(NamedTuple):
    """Asks one model. `model` is a name, or a Service that others start and stop; `version` "" is the default one.

    In a chain of tensors `inputs` says for an input of the model which of the chain's tensors it gets, `outputs` what an output
    of it is called in the chain. What they do not name has the same name in both.
    """

    model: "str | Service"
    version: str = ""
    inputs: Mapping[str, str] = {}
    outputs: Mapping[str, str] = {}


class Branch(NamedTuple):
    """Goes all `paths` at the same time, from the same item. Its answer is a dict with the answer of each path.

    With `fail_fast` the first error is the item's and the other paths are withdrawn; otherwise a path that failed has
    `{"error": text, "type": class}` for its answer, unless all have failed: the first one's error is the item's then. In a chain of tensors each path adds its own to the chain's tensors.
    """

    paths: Mapping[str, "Steps"]
    fail_fast: bool = True


class Switch(NamedTuple):
    """Goes the path in `cases` that the item's value says, or `default`; without a default other values are refused.

    `on` is a key of the item (a dict), a function of the item, or None: the item itself. In a chain of tensors it is the name of a
    tensor, all of whose elements must be equal.
    """

    on: str | Callable[[Any], Any] | None
    cases: Mapping[Any, "Steps"]
    default: "Steps | None" = None


Part = Union[Step, Branch, Switch, str, "Service"]
Steps = Sequence[Part]


def paths_of(part: Branch | Switch) -> list[Steps]:
    """Return the paths that may be gone."""
    if isinstance(part, Branch):
        return list(part.paths.values())
    return [*part.cases.values(), *([] if part.default is None else [part.default])]


def steps_in(steps: Steps) -> Iterator[Step]:
    """Yield every step, those of branches and switches too."""
    for part in steps:
        if isinstance(part, (Branch, Switch)):
            for path in paths_of(part):
                yield from steps_in(path)
        else:
            yield as_step(part)


def as_step(part: "Step | str | Service") -> Step:
    """Return a Step for what may stand for one."""
    return part if isinstance(part, Step) else Step(part)


def check_steps(steps: Any, label: str, *, tensors: bool) -> None:
    """Raise SettingsError unless `steps` can be those of a chain of items, or of tensors."""
    if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
        raise SettingsError(f"{label}: steps={steps!r:.100}: must be a list of at least one step")
    for part in steps:
        if isinstance(part, (Branch, Switch)):
            _check_parting(part, label, tensors)
            for path in paths_of(part):
                check_steps(path, label, tensors=tensors)
        elif not tensors and isinstance(part, Step) and (part.inputs or part.outputs):
            raise SettingsError(
                f"{label}: step {name_of(part)!r}: inputs and outputs are for chains that declare tensors"
            )
        elif not (isinstance(part, (Step, str)) or hasattr(part, "enter")):
            raise SettingsError(f"{label}: {part!r:.100}: is no step: must be a name, a Step, a Branch or a Switch")


def _check_parting(part: Branch | Switch, label: str, tensors: bool) -> None:
    if not paths_of(part):
        raise SettingsError(f"{label}: {type(part).__name__}: must have at least one path")
    if isinstance(part, Branch) and tensors and not part.fail_fast:
        raise SettingsError(f"{label}: fail_fast=False: a chain of tensors has all its outputs or an error")
    if isinstance(part, Switch) and tensors and not isinstance(part.on, str):
        raise SettingsError(f"{label}: Switch.on={part.on!r:.100}: must be the name of a tensor")


def name_of(step: Step) -> str:
    """Return what a step is called in messages."""
    if not isinstance(step.model, str):
        return step.model.label
    return f"{step.model}/{step.version}" if step.version else step.model
