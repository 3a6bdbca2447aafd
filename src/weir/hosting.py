"""A server from a program: `serve` blocks until a signal ends it, `running` runs one in a thread.

weir.serve(Square, port=8000)  # as `weir serve square:Square` does

with weir.running(Square) as server:
    print(weir.client.HttpClient(server.address).infer("square", 3))
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from weir.app import App, ServerThread
from weir.catalog.sources import target_of
from weir.console import serve as serve_in_terminal
from weir.errors import Conflict
from weir.model import Model
from weir.serving.service import Service
from weir.settings import Settings, read_settings
from weir.telemetry.output import open_standard_descriptors

if TYPE_CHECKING:
    from weir.keywords import ServerKeywords

Served = str | type[Model] | type[Service] | Callable[[list[Any]], Any]


class _Composed(NamedTuple):
    """The settings of a server, and the classes and functions among its models by target."""

    settings: Settings
    kinds: Mapping[str, Any]


def _composed(models: tuple[Served, ...], config: str | None, settings: Mapping[str, Any]) -> _Composed:
    open_standard_descriptors()
    kinds = {target_of(model): model for model in models if not isinstance(model, str)}
    return _Composed(read_settings([target_of(model) for model in models], {}, {}, config, given=settings), kinds)


def serve(*models: Served, config: str | None = None, **settings: "Unpack[ServerKeywords]") -> None:
    """Serve `models` until SIGTERM, SIGINT, SIGQUIT or SIGHUP, as `weir serve` does.

    Arguments:
        models: classes, functions, or TARGETs as on the command line.
        config: the path of a TOML file of settings.
        settings: those of `weir serve`, by the names of their TOML keys; they override the file. Variables of the environment are
            not read.

    Raises SettingsError for what cannot be served; ModelError with the worker's traceback if a model cannot be loaded; and Conflict
    outside the main thread or while an event loop is running; use `running` there.
    """
    if threading.current_thread() is not threading.main_thread():
        raise Conflict(
            "weir.serve runs in the main thread, which receives signals; in another thread, use weir.running"
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        composed = _composed(models, config, settings)
        serve_in_terminal(composed.settings, kinds=composed.kinds)
        return
    raise Conflict("an event loop is already running in this thread; use weir.running, which starts its own thread")


def running(*models: Served, config: str | None = None, **settings: "Unpack[ServerKeywords]") -> "HostedServer":
    """Return a server of `models` that runs in a thread from the beginning of a `with` block to its end.

    The arguments are those of `serve`, but `port` is by default 0, which means any free one: `address` says which. The program's own
    log is not changed: loggers are called `weir` and `weir.access`.

    Raises SettingsError for what cannot be served.
    """
    return HostedServer(_composed(models, config, {"port": 0, **settings}))


class HostedServer(ServerThread):
    """A server in a thread of this program, from `start` to `stop` or in a `with` block. It can be started once."""

    def __init__(self, composed: _Composed) -> None:
        super().__init__(App(composed.settings, kinds=composed.kinds), "weir-server")

    @property
    def address(self) -> str:
        """The address of HTTP: a URL such as http://127.0.0.1:8000, or unix:PATH. Clients take both."""
        return self._app.server.address

    def start(self) -> Self:
        """Start the server; return when all models are ready. Raises what App.run raises; nothing is left running then. Raises
        Conflict if it was started before."""
        if not self.begin():
            raise Conflict("this server was already started once; create another with weir.running")
        return self.loaded()

    def stop(self) -> None:
        """Finish the requests that were accepted, and end the server. Idempotent."""
        self.end()

    def __enter__(self) -> Self:
        return self.start()
