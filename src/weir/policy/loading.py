"""From the value of the setting `policy` to a Policy: an instance, a text, a file, the user's own class, or an entry point."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

from weir.errors import SettingsError
from weir.policy.decision import Policy
from weir.policy.grammar import build
from weir.policy.rules import ControlLimit, FullBatches, Greedy, SizeOrDelay

ENTRY_POINTS = "weir.policies"
AUTO = "auto"
BANK_FILE = ".npz"
RULES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {"greedy": Greedy, "size-or-delay": SizeOrDelay, "full": FullBatches, "control-limit": ControlLimit}
)


def load_policy(value: Any, *, max_batch_size: int | None = None, max_queue_delay: float | None = None) -> Policy:
    """Return the policy that `value` stands for, without memory: one that remembers is never shared (see `fresh` of Policy).

    `value` is a Policy, or a text: a rule of Weir's with its settings (grammar.py), `auto`, the path of a bank (.npz), the
    name of an entry point of the group `weir.policies`, `module:Class` or `path/to/file.py:Class`; all but the path with
    settings after a colon too. The limits of the batcher (rows, seconds) are held against the policy's own where both are
    known.

    Raises SettingsError naming the key, the value and the rule.
    """
    policy = _from_text(value) if isinstance(value, str) else value
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise SettingsError(f"policy={value!r}: must be a policy (an instance with a method decide(seen)) or a text")
    _check_size(policy, value, max_batch_size)
    _check_bank(policy, value, max_batch_size)
    _check_delay(policy, value, max_queue_delay)
    fresh = getattr(policy, "fresh", None)
    return policy if fresh is None else cast(Policy, fresh())


def _from_text(text: str) -> Any:
    if text.endswith(BANK_FILE):
        return _solved(Path(text), text)
    name, _, rest = text.partition(":")
    arguments = rest if ":" in text else None
    if name in RULES:
        return build(RULES[name], arguments, text)
    if name == AUTO:
        from weir.policy.auto import AutoPolicy  # numpy is for those who need it

        return build(AutoPolicy, arguments, text)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return _made(_guarded(entry.load, text), arguments, text)
    if arguments is None:
        raise SettingsError(f"policy={text!r}: must be one of {', '.join(_known())}, or module:Class")
    attribute, separator, rest = rest.partition(":")
    module = _guarded(lambda: _module(name, text), text)
    if not hasattr(module, attribute):
        raise SettingsError(f"policy={text!r}: {name} has no {attribute!r}")
    return _made(getattr(module, attribute), rest if separator else None, text)


def _solved(path: Path, text: str) -> Policy:
    from weir.policy.adaptive import SolvedPolicy  # numpy is for those who need it
    from weir.policy.bank import Bank

    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SettingsError(f"policy={text!r}: {str(path.absolute())!r} cannot be read: {reason}") from None
    return SolvedPolicy(Bank.from_bytes(data, f"policy={text!r}"))


def _known() -> list[str]:
    return [*RULES, AUTO, f"FILE{BANK_FILE}", *sorted(entry.name for entry in entry_points(group=ENTRY_POINTS))]


def _made(found: Any, arguments: str | None, text: str) -> Any:
    if isinstance(found, Policy) and not isinstance(found, type):
        if arguments is not None:
            raise SettingsError(f"policy={text!r}: {arguments!r} cannot be given to what is already a policy")
        return found
    if not callable(found):
        raise SettingsError(f"policy={text!r}: must be a class or a policy, is {found!r}")
    return build(found, arguments, text)


def _guarded(load: Callable[[], Any], text: str) -> Any:
    try:
        return load()
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(f"policy={text!r}: importing it raised {type(error).__name__}: {error}") from error


def _module(name: str, text: str) -> ModuleType:
    if name.endswith(".py"):
        return _file(Path(name), text)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the module was found; one that it imports was not
        known = ", ".join(_known())
        raise SettingsError(f"policy={text!r}: no rule and no module {name!r}; the rules are {known}") from None


def _file(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise SettingsError(f"policy={text!r}: no file {str(path.absolute())!r}")
    name = f"weir_policy_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"policy={text!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _check_size(policy: Policy, value: Any, largest: int | None) -> None:
    for rule, key in ((SizeOrDelay, "size"), (FullBatches, "size"), (ControlLimit, "limit")):
        own = getattr(policy, key) if isinstance(policy, rule) else None
        if own is not None and largest is not None and own > largest:
            raise SettingsError(f"policy={value!r}: {key}={own} must not be greater than max_batch_size={largest}")


def _check_bank(policy: Policy, value: Any, largest: int | None) -> None:
    """Hold that a solved policy is never asked about more rows than were measured: it would not know what they cost."""
    measured = getattr(policy, "largest_batch", None)
    if measured is not None and largest is not None and largest > measured:
        raise SettingsError(
            f"policy={value!r}: was solved for batches of up to {measured} rows, and max_batch_size={largest}; "
            f"lower max_batch_size to {measured}, or measure the model with larger batches and solve again"
        )


def _check_delay(policy: Policy, value: Any, longest: float | None) -> None:
    if isinstance(policy, SizeOrDelay) and longest is not None and policy.delay > longest:
        raise SettingsError(
            f"policy={value!r}: delay={policy.delay:g} must not be greater than max_queue_delay={longest:g}"
        )
