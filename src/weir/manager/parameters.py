"""What the parameters of `/v2/workers/{name}/load` mean: those of the AMD Inference Server, settings, and the model's own."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from weir.errors import Forbidden, InvalidRequest
from weir.manager.settings import KINDS
from weir.manager.spec import ModelToServe, Parameter, Parameters
from weir.model import Model
from weir.policy.loading import AUTO, RULES

# AMD's names for what Weir calls otherwise, with the factor to our unit.
RENAMED: dict[str, tuple[str, float | None]] = {
    "batch_size": ("max_batch_size", None),
    "batch": ("max_batch_size", None),
    "timeout": ("max_queue_delay", 0.001),  # milliseconds
}
# AMD's names for what is said elsewhere, or not at all, in Weir.
REFUSED = {
    "batchers": "one batcher serves all workers of an endpoint, so that any of them takes the next batch; say 1 or nothing",
    "model": "the model is the one that the path names; its constructor takes no 'model'",
    "next": "a worker is not chained to another one by loading it; serve a chain of models",
    "share": "a model that is loaded takes the place of the one that runs; load a worker to have one more",
    "pad_batch": "a model says itself whether its batches are padded (allowed_batch_sizes)",
    "worker": "the worker is the model that the path names; its constructor takes no 'worker'",
}
# What some of these are unless they are said.
SAYS_NOTHING: dict[str, Parameter] = {"batchers": 1, "share": True}
# Settings by which a load call could run code, read files or take memory as it likes.
NEED_FLAG = ("arena_bytes", "env", "executor", "worker_socket")


def check_allowed(parameters: Mapping[str, Any], allow_files: bool, *more: str) -> None:
    """Raise Forbidden for a parameter that can bring code or files into the server, or one of `more`, unless that is
    allowed."""
    if allow_files:
        return
    for name, value in parameters.items():
        if name in (*NEED_FLAG, *more) or (name == "policy" and not _is_plain_policy(value)):
            raise Forbidden(
                f"{name}={value!r}: may bring files or code into the server, which load calls may do only if it was started "
                "with --allow-model-files"
            )


def _is_plain_policy(value: Any) -> bool:
    name = str(value).partition(":")[0]
    return not str(value).endswith(".npz") and (name in RULES or (name == AUTO and "profile" not in str(value)))


def apply(parameters: Parameters, model: ModelToServe, kind: type[Model]) -> ModelToServe:
    """Return `model` as it is with these parameters: what its constructor takes goes there, the rest are settings.

    Raises InvalidRequest naming the parameter that is neither, or its value.
    """
    taken = _constructor_takes(kind)
    known = {declared.name: kind for kind in KINDS for declared in fields(kind)}
    params, settings = dict(model.params), dict(model.settings)
    for name, value in parameters.items():
        if name in taken:
            params[name] = value
        elif SAYS_NOTHING.get(name) == value:
            continue
        elif name in REFUSED:
            raise InvalidRequest(f"parameter {name!r}: {REFUSED[name]}")
        elif name in RENAMED:
            setting, factor = RENAMED[name]
            settings[setting] = _checked(known[setting], setting, _scaled(name, value, factor), name)
        elif name in known:
            settings[name] = _checked(known[name], name, value, name)
        else:
            takes = ", ".join(sorted(taken)) or "nothing"
            raise InvalidRequest(
                f"parameter {name!r}: is no setting, and the constructor of {kind.__name__} takes {takes}"
            )
    return model._replace(params=params, settings=settings)


def _constructor_takes(kind: type[Model]) -> set[str]:
    return set(inspect.signature(kind).parameters)


def _scaled(name: str, value: Parameter, factor: float | None) -> Parameter:
    if factor is None:
        return value
    if isinstance(value, (str, bool)):
        raise InvalidRequest(f"parameter {name}={value!r}: must be a number of milliseconds")
    return value * factor


def _checked(kind: type[Any], setting: str, value: Parameter, name: str) -> Parameter:
    """Return `value` if the setting can have it: a load call carries texts, numbers, true and false."""
    hint = get_type_hints(kind)[setting]
    kinds = tuple(each for each in get_args(hint) or (hint,) if each is not NoneType)
    if Any in kinds or (isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)):
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
    raise InvalidRequest(f"parameter {name}={value!r}: must be of type {wanted}")
