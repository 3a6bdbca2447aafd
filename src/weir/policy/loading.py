"""From the value of the setting `policy` to a Policy: an instance, a text, a file, a class of the user's own, or an
entry point.
"""

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Union, get_args, get_origin

from weir.config import parse_duration
from weir.errors import SettingsError, reason_of
from weir.plugins import Plugins
from weir.policy.decision import ControlLimit, FullBatches, Greedy, Policy, PolicyBase, SizeOrDelay, complete

# The text form of a policy: `name`, `name:value` or `name:key=value,key=value`.
#
#     greedy                                size-or-delay:size=32,delay=5ms
#     full                                  full:16
#     control-limit:8                       my_module:MyPolicy:patience=20ms
#
# A value alone belongs to the policy's first argument. Durations are in seconds, or carry `us`, `ms` or `s`.


WORDS = {"true": True, "false": False, "none": None}


def build(make: Callable[..., Any], arguments: str | None, text: str) -> Any:
    """Call `make`, a class or function, with the arguments that the text `arguments` states (None: there are none).

    `text` is the whole value of the setting, for error messages. Raises SettingsError naming the argument, its value
    and the rule that it breaks: unknown, given twice, missing, of the wrong type, or refused by `make`.
    """
    known = _parameters(make)
    values: dict[str, Any] = {}
    for part in arguments.split(",") if arguments is not None else ():
        key, separator, value = part.partition("=")
        if not separator:
            if values or not known:
                raise SettingsError(f"policy={text!r}: {part!r} must be key=value{_has(known)}")
            key, value = next(iter(known)), part
        if key not in known:
            raise SettingsError(f"policy={text!r}: no setting {key!r}{_has(known)}")
        if key in values:
            raise SettingsError(f"policy={text!r}: {key}={value}: {key} is given twice; give it once")
        values[key] = _convert(key, value, known[key].annotation, text)
    missing = [key for key, each in known.items() if each.default is each.empty and key not in values]
    if missing:
        raise SettingsError(f"policy={text!r}: {missing[0]} must be given, as in {text.split(':')[0]}:{missing[0]}=...")
    try:
        return make(**values)
    except SettingsError as error:
        raise SettingsError(f"policy={text!r}: {error.message}") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"policy={text!r}: {error}") from error


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(make, eval_str=True)
    except (NameError, SyntaxError):  # annotations that cannot be evaluated here; `_guess` decides the types
        signature = inspect.signature(make)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: each for name, each in signature.parameters.items() if each.kind not in variable}


def _has(known: dict[str, inspect.Parameter]) -> str:
    return "; it has " + ", ".join(known) if known else "; it has no settings"


def _convert(key: str, value: str, annotation: Any, text: str) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)
    if types.NoneType in kinds and value.lower() == "none":
        return None
    for kind, read, rule in (
        (bool, _read_bool, "must be true or false"),
        (int, int, "must be a whole number"),
        (float, parse_duration, "must be a number, or a duration such as 5ms"),
        (str, str, ""),
    ):
        if kind in kinds:
            try:
                return read(value)
            except ValueError:
                raise SettingsError(f"policy={text!r}: {key}={value!r}: {rule}") from None
    return _guess(value)


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _guess(text: str) -> Any:
    """Return the value of a text whose argument has no declared type: a word, a number, a duration, or the text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for read in (int, parse_duration):
        try:
            return read(text)
        except ValueError:
            continue
    return text


POLICIES = Plugins("policy", "weir.policies")
AUTO = "auto"
BANK_FILE = ".npz"
RULES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {"greedy": Greedy, "size-or-delay": SizeOrDelay, "full": FullBatches, "control-limit": ControlLimit}
)


def load_policy(value: Any, *, max_batch_size: int | None = None, max_queue_delay: float | None = None) -> Policy:
    """Return the policy that `value` stands for, without a memory of earlier use.

    Args:
        value: a Policy, or a text. A text names a rule of Weir's (see the examples at the top of this file), `auto`,
            the path of a bank (.npz), an entry point of the group `weir.policies`, `module:Class` or
            `path/to/file.py:Class`. All but the path of a bank may be followed by a colon and arguments.
        max_batch_size: rows; a policy that needs larger batches is refused. None: not checked.
        max_queue_delay: seconds; a policy that waits longer by itself is refused. None: not checked.

    Raises SettingsError naming the setting, its value and the rule.
    """
    policy = _from_text(value) if isinstance(value, str) else value
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise SettingsError(f"policy={value!r}: must be a policy (an instance with a method decide(seen)) or a text")
    _check_size(policy, value, max_batch_size)
    completed = complete(policy)
    _check_bank(completed, value, max_batch_size)
    _check_delay(policy, value, max_queue_delay)
    return completed.fresh()


def largest_batch(value: Any) -> int | None:
    """Return the largest batch, in rows, whose cost the policy that `value` stands for knows; None: any. Raises what load_policy raises."""
    if isinstance(value, str) and not value.endswith(BANK_FILE) and not value.startswith(f"{AUTO}:"):
        return None
    return complete(load_policy(value)).largest_batch


def _from_text(text: str) -> Any:
    if text.endswith(BANK_FILE):
        return _solved(Path(text), text)
    name, _, rest = text.partition(":")
    arguments = rest if ":" in text else None
    if name in RULES:
        return build(RULES[name], arguments, text)
    if name == AUTO:
        from weir.policy.online.adaptive import AutoPolicy  # only solved policies need numpy

        return build(AutoPolicy, arguments, text)
    if name in POLICIES:
        return _made(POLICIES.load(name), arguments, text)
    if arguments is None:
        nearest = get_close_matches(name, _known(), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise SettingsError(f"policy={text!r}: must be one of {', '.join(_known())}, or module:Class{hint}")
    attribute, separator, rest = rest.partition(":")
    module = _guarded(lambda: _module(name, text), text)
    if not hasattr(module, attribute):
        raise SettingsError(f"policy={text!r}: {name} has no {attribute!r}")
    return _made(getattr(module, attribute), rest if separator else None, text)


def _solved(path: Path, text: str) -> Policy:
    from weir.policy.online.adaptive import SolvedPolicy  # only solved policies need numpy
    from weir.policy.solve.bank import Bank

    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"policy={text!r}: {str(path.absolute())!r} cannot be read: {reason_of(error)}") from None
    return SolvedPolicy(Bank.from_bytes(data, f"policy={text!r}"))


def _known() -> list[str]:
    return [*RULES, AUTO, f"FILE{BANK_FILE}", *POLICIES.names()]


def _made(found: Any, arguments: str | None, text: str) -> Any:
    if isinstance(found, Policy) and not isinstance(found, type):
        if arguments is not None:
            raise SettingsError(
                f"policy={text!r}: {arguments!r} cannot be passed to a policy that is already an instance"
            )
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
            raise  # the module exists; a module that it imports does not
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


def _check_bank(policy: PolicyBase, value: Any, largest: int | None) -> None:
    """Refuse a `max_batch_size` larger than the batches a solved policy was made for: it does not know their cost."""
    measured = None if largest is None else policy.largest_batch
    if measured is not None and largest is not None and largest > measured:
        raise SettingsError(
            f"policy={value!r}: was solved for batches of up to {measured} rows, and max_batch_size={largest}; "
            "leave max_batch_size out, or measure the model with larger batches and solve again"
        )


def _check_delay(policy: Policy, value: Any, longest: float | None) -> None:
    if isinstance(policy, SizeOrDelay) and longest is not None and policy.delay > longest:
        raise SettingsError(
            f"policy={value!r}: delay={policy.delay:g} must not be greater than max_queue_delay={longest:g}"
        )
