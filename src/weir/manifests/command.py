"""The command of a container that serves, from what `weir serve` would be given here.

The settings are read as `weir serve` reads them, so a wrong one is refused with the same words. Each flag is handed on as it was given, a
variable as a variable, and the file of --config as a ConfigMap. What a container needs besides is added unless it was stated.
"""

import math
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.protocols.access import is_loopback
from weir.serving.settings import END_LIMIT, ServiceSettings
from weir.settings import Declared, Settings, config_variable, declared_settings, read_settings, variables_of
from weir.workers.settings import WorkerSettings, check_ray

PRE_STOP = 5  # seconds in which a pod that ends still takes requests: balancers learn of its end at about the same time as it does itself
MARGIN = 3  # seconds beyond the server's own last limit
CONFIG_FOLDER = "/etc/weir"
CONFIG_FILE = "weir.toml"
# What a container adds to what is stated: all interfaces, a log for machines, and a liveness that restarts a pod whose model cannot come back.
_ADDED = {"host": "0.0.0.0", "log_format": "json", "liveness": "models"}


class ServeCommand(NamedTuple):
    """What a container runs: `weir serve` with `given` and `added`.

    Attributes:
        settings: all settings that follow from the words, the variables and the file.
        added: the flags that a container needs and nobody has stated.
        given: the targets and flags as they were given.
        variables: the environment variables, by name.
        config: the content of the file of settings, or None.
        stated: the names of the settings that a flag, a variable or the file states.
    """

    settings: Settings
    added: Sequence[str]
    given: Sequence[str]
    variables: Mapping[str, str]
    config: str | None
    stated: Set[str]

    @property
    def port(self) -> int:
        """The port of HTTP."""
        return self.settings.http.port

    @property
    def grpc_port(self) -> int | None:
        """The port of gRPC, or None."""
        return self.settings.grpc.grpc_port

    @property
    def fronts(self) -> int:
        """How many processes read requests."""
        return int(self.settings.process.fronts)

    @property
    def scheme(self) -> str:
        """HTTP or HTTPS."""
        return "HTTPS" if self.settings.http.tls_certfile else "HTTP"

    @property
    def drain_timeout(self) -> float:
        """The longest time, in seconds, that accepted requests get to finish."""
        return self._longest("drain_timeout", ServiceSettings.drain_timeout)

    @property
    def grace_period(self) -> int:
        """The seconds after which a pod that ends is killed: later than its server ends by itself, whatever hangs."""
        return math.ceil(PRE_STOP + self.drain_timeout + END_LIMIT + MARGIN)

    @property
    def start_limit(self) -> int:
        """The seconds after which a server that is not ready has failed to start, although it has not ended."""
        return math.ceil(self._longest("start_timeout", WorkerSettings.start_timeout)) + 30

    def _longest(self, name: str, default: float) -> float:
        return max(float(settings.get(name, default)) for settings in self.of_models)

    @property
    def of_models(self) -> list[Mapping[str, Any]]:
        """The settings of each model, as far as they are stated; those of any model where all come from a repository."""
        return [model.settings for model in self.settings.models] or [self.settings.complete({})]


def read_command(
    targets: Sequence[str],
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    config: str | None,
    port: int = 8000,
    ignored: Collection[str] = (),
) -> ServeCommand:
    """Return the command for these settings; `port` is that of HTTP if none is stated, and the other arguments are those of
    settings.read_settings.

    Raises SettingsError for a wrong setting, and for one that no container can have.
    """
    settings = read_settings(targets, flags, environment, config, ignored=ignored)
    catalog = declared_settings()
    path = config or config_variable(environment)
    text = None if path is None else Path(path).read_text("utf-8-sig")
    variables = {
        name: value for name, value in variables_of(environment, catalog, ignored).items() if name not in flags
    }
    stated = {*flags, *variables, *({} if text is None else tomllib.loads(text))}
    _refuse(settings, catalog, stated)
    added = {name: value for name, value in {"port": str(port), **_ADDED}.items() if name not in stated}
    given = [*targets, *([] if text is None else [f"--config={CONFIG_FOLDER}/{CONFIG_FILE}"]), *_words(flags, catalog)]
    words = [f"{catalog[name].flag}={value}" for name, value in added.items()]
    by_variable = {catalog[name].variable: value for name, value in variables.items()}
    if "port" in added:
        settings = settings._replace(http=replace(settings.http, port=port))
    command = ServeCommand(settings, words, given, by_variable, text, stated)
    if any("drain_timeout" in each for each in command.of_models):
        return command
    # The grace period of the pod follows from it, so what a model's class may say must not count.
    return command._replace(added=[*words, f"{catalog['drain_timeout'].flag}={ServiceSettings.drain_timeout:g}"])


def _words(flags: Mapping[str, Sequence[str]], catalog: Mapping[str, Declared]) -> Iterator[str]:
    """Yield the flags with their values, as they are written on a command line."""
    for name, texts in flags.items():
        declared = catalog[name]
        for text in texts:
            if declared.is_switch:
                yield declared.flag if text == "true" else f"--no-{declared.flag[2:]}"
            else:
                yield f"{declared.flag}={text}"


def _refuse(settings: Settings, catalog: Mapping[str, Declared], stated: Collection[str]) -> None:
    """Raise SettingsError for what a container cannot have."""
    for name in stated:
        if name in catalog and catalog[name].secret:
            raise SettingsError(
                f"{catalog[name].flag}: whoever reads a manifest would read it; put it into a Secret with the entry "
                "api-key (--api-key-secret)"
            )
    http = settings.http
    if http.uds is not None:
        raise SettingsError(f"--uds={http.uds!r}: a Service reaches pods by a port; leave it out")
    if "host" in stated and is_loopback(http.host):
        raise SettingsError(f"--host={http.host!r}: probes and callers come from outside the pod; leave it out")
    for flag, port in (("--port", http.port), ("--grpc-port", settings.grpc.grpc_port)):
        if port == 0:
            raise SettingsError(f"{flag}=0: a Service has to name the port; must be 1 to 65535")
    if settings.process.fronts == "auto":
        raise SettingsError("--fronts=auto: a pod sees all CPUs of its node, not those it requests; state a number")
    for model in settings.models:
        check_ray(model.settings, str(model.settings.get("executor", WorkerSettings.executor)))
    if settings.grpc.grpc_port == http.port:
        raise SettingsError(f"--grpc-port={http.port}: is the port of HTTP; they must differ")
