"""From what was said of a model to a Service of it, not started."""

import inspect
from collections.abc import Sequence
from typing import Any

from weir.errors import SettingsError
from weir.manager.parameters import apply
from weir.manager.service import Service
from weir.manager.spec import ModelToServe, Parameters
from weir.manager.targets import load_target
from weir.messages import Observer
from weir.model import Model
from weir.telemetry.logs import redacted
from weir.workers.remote.address import WorkerAddress, parse_address

LOAD_NICENESS = 19


def make_service(
    model: ModelToServe, observers: Sequence[Observer], parameters: Parameters | None = None, *, fresh: bool = False
) -> Service:
    """Return the service of one model, not started. `parameters` of a load call are put over what was said; with `fresh` its
    code is read anew, though it may be loaded already.

    Imports the model's code, which may take long: beside a running event loop, call it in a thread. Raises SettingsError naming
    the model, InvalidRequest for a parameter.
    """
    if model.folder is not None or not model.target:
        from weir.manager.repository.platforms import platform_of

        found = platform_of(model.platform).load(model)
    else:
        found = load_target(model.target, fresh=fresh)
        if model.attributes and not issubclass(found, Service):
            from weir.manager.repository.tensors import with_attributes

            found = with_attributes(found, model)
    if parameters:
        kind: type[Model] = found.model if issubclass(found, Service) else found
        model = apply(parameters, model, kind)
    said: dict[str, Any] = {
        "name": model.name, "version": model.version, "platform": model.platform, "params": model.params,
        "observers": observers, **model.settings,
    }  # fmt: skip
    if fresh:  # others serve meanwhile
        said.setdefault("load_niceness", LOAD_NICENESS)
    try:
        service = found(**said) if issubclass(found, Service) else Service(found, **said)
    except SettingsError as error:
        raise SettingsError(f"{model.label}: {error.message}") from error
    _check_params(service)
    return service


class Maker:
    """Makes the services of one server: `observers` hear what happens in all of them. External workers attach from this
    machine only, unless `allow_remote_workers`, and over Unix sockets only, unless `allow_tcp_workers`."""

    def __init__(
        self, observers: Sequence[Observer], *, allow_remote_workers: bool = False, allow_tcp_workers: bool = True
    ) -> None:
        self._observers = observers
        self._allow_tcp_workers = allow_tcp_workers
        self._allow_remote_workers = allow_remote_workers

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service, not started; see make_service."""
        service = make_service(model, self._observers, parameters, fresh=fresh)
        if service.workers.worker_socket is not None:
            self._check_socket(service.label, parse_address(service.workers.worker_socket, "worker_socket"))
        return service

    def _check_socket(self, label: str, address: WorkerAddress) -> None:
        """Refuse a socket that those could attach to who may not control this server: workers send no token."""
        if not (address.path or self._allow_tcp_workers):
            raise SettingsError(
                f"{label}: worker_socket={str(address)!r}: must be unix:PATH, as the server has a control token and workers send none"
            )
        if not (address.is_local or self._allow_remote_workers):
            raise SettingsError(
                f"{label}: worker_socket={str(address)!r}: must be unix:PATH or on a loopback address, as workers send no token; "
                "a server started with --allow-control lets them attach from other machines"
            )


def _check_params(service: Service) -> None:
    """Refuse before any worker is started what the model's constructor does not take."""
    signature = inspect.signature(service.model)
    try:
        signature.bind(**service.params)
    except TypeError as error:
        raise SettingsError(
            f"{service.label}: params={redacted(service.params)!r}: {error}; {service.model.__name__} takes {signature}"
        ) from error
