"""One running model: its service, the driver of its batches, its callers, hooks and streams.

Here are the settings of a service, the rules for names and versions, and how the settings of a service are put together.
"""

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from weir.batching import BatchingSettings
from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, Checked, setting
from weir.errors import SettingsError
from weir.model import Model, check_attributes, is_batched
from weir.policy.loading import largest_batch
from weir.wire.data_plane import MODEL_WORDS
from weir.workers.settings import WorkerSettings, check_ray

# Seconds after the drain_timeout at which a server ends in any case: workers get five seconds to unload, and five to exit.
END_LIMIT = 12.0


@dataclass(frozen=True)
class ServiceSettings(Checked):
    """The settings that concern callers. Durations are in seconds."""

    timeout: float = setting(30.0, "seconds until a request expires, unless it has its own timeout", rule=POSITIVE)
    drain_timeout: float = setting(
        30.0, "seconds that accepted requests have to finish at shutdown", rule=AT_LEAST_ZERO
    )
    stream_buffer: int = setting(
        256, "responses buffered for a slow reader before its stream is closed", rule=AT_LEAST_ONE
    )
    backpressure: bool = setting(True, "in-process calls wait while the queue is full instead of failing")


class Composed(NamedTuple):
    """The settings of one service, of all three kinds."""

    batching: BatchingSettings
    workers: WorkerSettings
    service: ServiceSettings


KINDS = (BatchingSettings, WorkerSettings, ServiceSettings)


def known_settings() -> list[str]:
    """Return the names of all settings that a service takes."""
    return [declared.name for kind in KINDS for declared in fields(kind)]


def compose(model: type[Model], given: dict[str, Any]) -> Composed:
    """Return the settings of a service of `model`.

    The model's class attributes override Weir's defaults, and `given` overrides both. Without a max_batch_size, a solved policy's own
    holds. A model that cannot batch always has max_batch_size 1. Raises SettingsError for an unknown key (and names the most similar one), and for a value against its rule.
    """
    known = known_settings()
    for key in given:
        if key not in known:
            raise SettingsError(unknown_setting(key, known))
    check_attributes(model, [name for name in known if "_" in name])
    chosen = _chosen(BatchingSettings, model, given)
    if (largest := largest_batch(chosen.get("policy", BatchingSettings.policy))) is not None:
        chosen = {"max_batch_size": largest, **chosen}
    batching = BatchingSettings(**chosen)
    if not is_batched(model):  # settings for all models of a server may say otherwise
        batching = replace(batching, max_batch_size=1)
    sizes = model.allowed_batch_sizes
    if sizes is not None and batching.max_batch_size > max(sizes):
        raise SettingsError(
            f"max_batch_size={batching.max_batch_size}: must be at most {max(sizes)}, the largest of the model's "
            "allowed_batch_sizes"
        )
    workers = WorkerSettings(**_chosen(WorkerSettings, model, given))
    check_ray(given, workers.executor)
    return Composed(batching, workers, ServiceSettings(**_chosen(ServiceSettings, model, given)))


def unknown_setting(key: str, known: list[str]) -> str:
    """Return the message about a setting that does not exist."""
    near = get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "the settings are " + ", ".join(sorted(known))
    return f"{key}: unknown setting; {hint}"


def _chosen(kind: Any, model: type[Model], given: dict[str, Any]) -> dict[str, Any]:
    chosen = {}
    for declared in fields(kind):
        if declared.name in given:
            chosen[declared.name] = given[declared.name]
        elif getattr(model, declared.name, None) is not None:
            chosen[declared.name] = getattr(model, declared.name)
    return chosen


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,254}")  # one segment of a path, also safe as the name of a file
LONGEST_NAME = 255  # characters

# The segments that may follow a model's name in a path. A name may have several segments, such as OWNER/NAME, but none of these
# behind the first: so a path says where a name ends, and a slash in it need not be percent-encoded.
PATH_WORDS = ("batch", "generate", "generate_stream", "infer", "infer_stream", "policy", *sorted(MODEL_WORDS))
NAME_IN_PATH = rf"[^/?#]+(?:/(?!(?:{'|'.join(PATH_WORDS)})(?:/|$))[^/?#]+)*"


def is_name(name: str) -> bool:
    """Return whether a model may have this name."""
    first, *more = name.split("/")
    segments = all(NAME.fullmatch(each) for each in (first, *more))
    return segments and len(name) <= LONGEST_NAME and not set(more) & set(PATH_WORDS)


def check_name(name: str) -> str:
    """Return `name` if a model may have it. Raises SettingsError otherwise."""
    if not is_name(name):
        word = next((each for each in name.split("/")[1:] if each in PATH_WORDS), None)
        near = "/".join(re.sub(r"[^A-Za-z0-9._~-]+", "-", each).strip(".~-") for each in name.split("/"))[:LONGEST_NAME]
        hint = f"; {near!r} would do" if is_name(near) else ""
        rule = f"must be up to {LONGEST_NAME} letters, digits and . _ ~ - in parts between slashes that begin with a letter, a digit or _"
        raise SettingsError(
            f"name={name!r}: {rule}{hint}"
            if word is None
            else f"name={name!r}: must not have /{word}, which follows names in paths"
        )
    return name


def check_version(version: str) -> str:
    """Return `version` if it is valid as a segment of a path, or "" (none). Raises SettingsError otherwise."""
    if version and not NAME.fullmatch(version):
        raise SettingsError(
            f"version={version!r}: must be of letters, digits and . _ ~ -, and must not begin with . ~ or -"
        )
    return version
