"""Makes Services and profiles from TARGETs and from descriptions of models.

This imports the users' code and applies the parameters of load calls. A profile is measured as the service would run, with the
same settings, but with one worker.
"""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from weir.batching.workers import ORDERS, SOLVED
from weir.catalog.chains import chain_of
from weir.catalog.repository.model_files import with_attributes
from weir.catalog.sources import (
    ModelToServe,
    Parameter,
    Parameters,
    Trust,
    located,
    model_to_load,
    platform_of,
    split_target,
)
from weir.errors import Forbidden, InvalidRequest, SettingsError
from weir.messages import Observer
from weir.model import Model, adapted, check_model
from weir.policy.cost import Profile
from weir.policy.loading import AUTO, RULES
from weir.profiling import Items, ProfilingSettings, items_of, read_items
from weir.profiling.machine import describe_machine, find_meters
from weir.profiling.measure import NO_METERS, Progress, grid, measure
from weir.profiling.sampling import Measuring
from weir.serving import KINDS
from weir.serving.generation import OnDemand
from weir.serving.service import Service
from weir.telemetry.logs import redacted
from weir.workers import source
from weir.workers.cpus import share_of_cpus
from weir.workers.settings import ONE_WORKER, WorkerAddress, WorkerSettings, parse_address
from weir.workers.source import FOLDER, ModelFolder, folder_of, import_text
from weir.workers.timer import new_loop
from weir.workers.turns import DeviceGroup

if TYPE_CHECKING:
    from weir.tuning.device import DeviceGroups

FindGroup = Callable[[str, str], DeviceGroup]  # the device group of a name and an order


def load_target(target: str, *, fresh: bool = False, trust: Trust | None = None) -> type[Model] | type[Service]:
    """Import and return the Model or Service class that `target` names; for a function, a model made of it; for a file or a task,
    the class that serves it, as far as `trust` allows.

    With `fresh`, a module that is already imported is read again, unless it is one of Weir's own; the modules that it imports are not.

    Modules are found as `python -m` finds them, the working directory first. For a file, its folder (or the folder of its
    package) is added to sys.path, so that worker processes find the class under the same name.
    Raises SettingsError with one line that says what was looked for and where.
    """
    if (model := model_to_load(target, trust)) is not None:
        return _load_on_platform(model)
    try:
        where, name = split_target(target)
    except SettingsError as error:
        raise SettingsError(f"{error.message}{_named_apart(target)}") from None
    importlib.invalidate_caches()
    before = set(sys.modules)
    module = _load_file(target, Path(where)) if where.endswith(".py") else _load_module(target, where)
    is_own = module.__name__.partition(".")[0] == "weir"
    if fresh and not is_own and module.__name__ in before and str(module.__file__).endswith(".py"):
        module = reread(target, module.__name__, Path(str(module.__file__)))
    with source.reading(getattr(module, FOLDER, None)):
        return class_in(module, name, target)


def _load_on_platform(model: ModelToServe) -> type[Model] | type[Service]:
    return platform_of(model.platform).load(model)


def _named_apart(target: str) -> str:
    """Return a hint for a target that names a file or a module, but nothing in it."""
    file = Path(target if target.endswith(".py") else f"{target.replace('.', '/')}.py")
    if file.is_file():
        found = " or ".join(f"{target}:{name}" for name in _classes_in(file))
        return f"; did you mean {found}?" if found else f"; name the class or function in it: {target}:NAME"
    if Path(target).is_dir():
        return f"; a folder of models is served whole: weir serve {target}"
    if "/" in target and not Path(target).exists():
        return f"; there is nothing at {Path(target).absolute()}"
    return ""


def _classes_in(file: Path) -> list[str]:
    """Return the names of the classes with a method `predict` in a file, whose code is not run."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    classes = [each for each in body if isinstance(each, ast.ClassDef)]
    return [kind.name for kind in classes if any(getattr(each, "name", "") == "predict" for each in kind.body)]


def _load_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingsError(f"TARGET {target!r}: no file {path.absolute()}")
    folder, parts = path.absolute().parent, [path.stem]
    while (folder / "__init__.py").is_file():  # a file of a package may use relative imports
        parts.insert(0, folder.name)
        folder = folder.parent
    models = folder_of(str(folder))
    models.put_on_path()
    name = models.name_of(parts[0], is_own=True)
    if len(parts) > 1 and name != parts[0]:
        raise SettingsError(
            f"TARGET {target!r}: its name is taken by module {parts[0]!r} of "
            f"{getattr(sys.modules[parts[0]], '__file__', None) or 'the interpreter'}; the names of packages must differ"
        )
    with source.reading(models):
        return _import(target, ".".join([name, *parts[1:]]))


def _load_module(target: str, name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    top, _, rest = name.partition(".")
    folder = None
    present = sys.modules.get(top)
    # A file of the working directory, as far as is known.
    if not rest and (present is None or hasattr(present, FOLDER)):
        folder = folder_of(str(Path.cwd()))
        name = folder.name_of(top)
    for depth, part in enumerate(parts := name.split(".")):
        if _is_missing(".".join(parts[: depth + 1]), target):
            where = f"package {'.'.join(parts[:depth])!r}" if depth else f"{Path.cwd()} or on sys.path"
            raise SettingsError(f"TARGET {target!r}: no module {part!r} in {where}{_similar_file(part, depth)}")
    with source.reading(folder):
        return _import(target, name)


def reread(target: str, name: str, path: Path, folder: ModelFolder | None = None) -> ModuleType:
    """Read the code at `path` and make it the module `name`. Classes of the former module stay valid where they are in use.

    `folder` is where it first looks for the modules that it imports (None: where the former one does). Raises SettingsError; the former
    module stays then.
    """
    if folder is None:
        folder = getattr(sys.modules.get(name), FOLDER, None)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"TARGET {target!r}: {path} cannot be read: {error.strerror}") from error
    linecache.checkcache(str(path))
    try:
        return import_text(name, str(path), text, folder)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"TARGET {target!r}: importing {path} raised {_describe(error)}") from error


def _is_missing(name: str, target: str) -> bool:
    if name in sys.modules:
        return False
    parent = name.rpartition(".")[0]
    if parent:
        _import(target, parent)
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def _similar_file(name: str, depth: int) -> str:
    names = [path.stem for path in Path.cwd().glob("*.py")] if depth == 0 else []
    nearest = get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _import(target: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"TARGET {target!r}: importing {name} raised {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Return one line of text: the error, and the line of the user's code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    inside = [frame for frame in frames if frame.filename not in (__file__, source.__file__)]
    return f"{text} ({inside[-1].filename}, line {inside[-1].lineno})" if inside else text


def class_in(module: ModuleType, name: str, target: str) -> type[Model] | type[Service]:
    """Return the class `name` of `module`. Raises SettingsError, which names the module's models, if it is not a model."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            where = getattr(module, "__file__", None) or module.__name__
            raise SettingsError(f"TARGET {target!r}: {where} has no {name!r}{_candidates_text(module, name)}")
    if isinstance(found, type) and issubclass(found, Service):
        check_model(found.model)
        return found
    if isinstance(found, type) and not issubclass(found, Model):
        found = adapted(found) or found
    if not (callable(found) if not isinstance(found, type) else issubclass(found, Model)):
        what = f"an instance of {type(found).__name__}" if not isinstance(found, type) else "a class"
        raise SettingsError(
            f"TARGET {target!r}: {name} is {what}, but must be a subclass of weir.Model or weir.Service, or a function"
            f"{_candidates_text(module, name)}"
        )
    return check_model(found)


def _candidates_text(module: ModuleType, name: str) -> str:
    """Return a text that lists the module's models, the one most similar to `name` first."""
    names = [
        own
        for own, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, (Model, Service)) and value.__module__ == module.__name__
    ]
    if not names:
        return "; it defines no model"
    nearest = get_close_matches(name, names, n=1)
    names.sort(key=lambda own: own not in nearest)
    return f"; its models: {', '.join(names)}"


# Parameters that have another name in Weir, with the factor from the AMD Inference Server's unit to ours.
RENAMED: dict[str, tuple[str, float | None]] = {
    "batch_size": ("max_batch_size", None),
    "batch": ("max_batch_size", None),
    "timeout": ("max_queue_delay", 0.001),  # milliseconds
}
# Parameters of the AMD Inference Server that Weir does not have, and what to do instead.
REFUSED = {
    "batchers": "one batcher serves all workers of an endpoint, so any of them takes the next batch; give 1, or leave it out",
    "model": "the path names the model; its constructor takes no 'model'",
    "next": "loading a worker does not chain it to another one; serve a chain of models",
    "share": "a loaded model replaces the one that runs; load a worker to have one more",
    "pad_batch": "the model's class declares whether its batches are padded (allowed_batch_sizes)",
    "worker": "the path names the model, which is the worker; its constructor takes no 'worker'",
}
# Values with which these change nothing, so that they are accepted.
NEUTRAL: dict[str, Parameter] = {"batchers": 1, "share": True}
# Settings with which a load call could run code, read files or take any amount of memory.
NEED_FLAG = ("arena_bytes", "env", "executor", "worker_socket")


def check_allowed(parameters: Mapping[str, Any], allow_files: bool, *more: str) -> None:
    """Raise Forbidden for a parameter that can bring code or files into the server, and for those named in `more`, unless
    `allow_files`."""
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
    """Return `model` with these parameters of a load call: arguments of its constructor, or else settings.

    Raises InvalidRequest naming the parameter if it is neither, or if its value is invalid.
    """
    taken = set(inspect.signature(kind).parameters)
    known = {declared.name: kind for kind in KINDS for declared in fields(kind)}
    params, settings = dict(model.params), dict(model.settings)
    for name, value in parameters.items():
        if name in taken:
            params[name] = value
        elif NEUTRAL.get(name) == value:
            continue
        elif name in REFUSED:
            raise InvalidRequest(f"parameter {name!r}: {REFUSED[name]}")
        elif name in RENAMED:
            setting, factor = RENAMED[name]
            settings[setting] = _checked_setting(known[setting], setting, _scaled(name, value, factor), name)
        elif name in known:
            settings[name] = _checked_setting(known[name], name, value, name)
        else:
            takes = ", ".join(sorted(taken)) or "nothing"
            rule = f"parameter {name!r}: is not a setting, and the constructor of {kind.__name__} takes {takes}"
            raise InvalidRequest(rule)
    return model._replace(params=params, settings=settings)


def _scaled(name: str, value: Parameter, factor: float | None) -> Parameter:
    if factor is None:
        return value
    if isinstance(value, (str, bool)):
        raise InvalidRequest(f"parameter {name}={value!r}: must be a number of milliseconds")
    return value * factor


def _checked_setting(kind: type[Any], setting: str, value: Parameter, name: str) -> Parameter:
    """Return `value` with the type of the setting. A load call carries strings, numbers and booleans only."""
    hint = get_type_hints(kind)[setting]
    kinds = tuple(each for each in get_args(hint) or (hint,) if each is not NoneType)
    if Any in kinds or (isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)):
        return value
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
    raise InvalidRequest(f"parameter {name}={value!r}: must be of type {wanted}")


def new_service(found: Any, *, group_of: FindGroup | None = None, **arguments: Any) -> Service:
    """Return a service with these arguments of Service, which is not started. `found` is a subclass of Service, a model's class, or a
    function. `group_of` finds the device group that the settings name; without it the model takes no turns. Raises SettingsError."""
    own = found.model if isinstance(found, type) and issubclass(found, Service) else found
    group, order = (arguments.get(key) or getattr(own, key, None) for key in ("device_group", "device_order"))
    if group is not None and group_of is not None:
        arguments["device"] = group_of(group, order or SOLVED)
    elif group is not None:
        arguments["device_group"] = None
    if isinstance(found, type) and issubclass(found, Service):
        return found(**arguments)
    return Service(found, **arguments)


def device_group(name: str, order: str = SOLVED) -> DeviceGroup:
    """Return a device group for services of this program: `Service(Model, device=group)`. Its models take turns on the device.

    Arguments:
        name: for log lines and errors.
        order: whose turn it is: solved, longest, oldest or fair. Solved needs the policy `auto` of each model.

    Raises SettingsError for another order.
    """
    if order not in ORDERS:
        raise SettingsError(f"device_group={name!r}, order={order!r}: must be one of {', '.join(ORDERS)}")
    return group_finder()(name, order)


def group_finder() -> FindGroup:
    """Return what finds the device groups of one server, and makes each when its first model needs it."""

    @cache
    def groups() -> "DeviceGroups":
        from weir.tuning.device import DeviceGroups  # loads the solver, which only device groups need

        return DeviceGroups(time.monotonic)

    return lambda name, order: groups().group(name, order)


def make_service(
    model: ModelToServe,
    observers: Sequence[Observer],
    parameters: Parameters | None = None,
    *,
    fresh: bool = False,
    kind: Any = None,
    group_of: FindGroup | None = None,
    on_demand: OnDemand | None = None,
) -> Service:
    """Return a service of one model, which is not started. `kind` is its class or function, if the program has it already.
    Without `group_of` it takes no turns with others, whatever its device_group is. `on_demand` starts it when a request comes.

    `parameters` of a load call override the model's settings. With `fresh`, its code is read again even if it is already
    imported. This imports the model's code, which may take long: next to a running event loop, call it in a thread. The folder of
    that code keeps the names of its modules until source.release gets the service's generation.
    Raises SettingsError naming the model, and InvalidRequest for a parameter.
    """
    with source.reading(model.uploaded):
        found = _class_of(model, fresh) if kind is None else _checked_class(kind)
    more: dict[str, Any] = {} if on_demand is None else {"on_demand": on_demand}
    named = {"name": model.name, "version": model.version, "platform": model.platform}
    with source.reading(model.uploaded), source.reading(source.folder_that_has(found)):
        if parameters:
            model = apply(parameters, model, found.model if issubclass(found, Service) else found)
        arguments = {**named, "params": model.params, "observers": observers, **model.settings, **more}
        try:
            service = new_service(found, group_of=group_of, **arguments)
        except SettingsError as error:
            raise SettingsError(f"{model.label}: {error.message}") from error
        _check_arguments(service)
    kinds = found, service.generation.model
    source.hold(service.generation, (*map(source.folder_that_has, kinds), model.uploaded))
    return service


def _class_of(model: ModelToServe, fresh: bool) -> type[Model] | type[Service]:
    model = located(model)
    if model.folder is not None or not model.target or model.platform != "python":
        return _load_on_platform(model)
    found = load_target(model.target, fresh=fresh)
    if not model.attributes or issubclass(found, Service):
        return found
    return with_attributes(found, model)


def _checked_class(kind: Any) -> type[Model] | type[Service]:
    return kind if isinstance(kind, type) and issubclass(kind, Service) else check_model(kind)


class ServiceMaker:
    """Makes the services of one server.

    Arguments:
        kinds: classes and functions that the program has passed, by target.
        observers: are notified of what happens in all services.
        allow_remote_workers: whether external workers may attach from other machines.
        allow_tcp_workers: whether external workers may attach over TCP; otherwise over Unix sockets only.
        on_demand: starts services when requests come for them.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        kinds: Mapping[str, Any] = MappingProxyType({}),
        *,
        allow_remote_workers: bool = False,
        allow_tcp_workers: bool = True,
        on_demand: OnDemand | None = None,
    ) -> None:
        self._on_demand = on_demand
        self._observers = observers
        self._kinds = kinds
        self._allow_tcp_workers = allow_tcp_workers
        self._allow_remote_workers = allow_remote_workers
        self._group_of = group_finder()

    def __call__(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        """Return a service that is not started; see make_service. Raises SettingsError for a worker socket that the server
        does not allow."""
        kind = self._kinds.get(model.target)
        service = make_service(
            model,
            self._observers,
            parameters,
            fresh=fresh,
            kind=kind,
            group_of=self._group_of,
            on_demand=self._on_demand,
        )
        if service.workers.worker_socket is not None:
            self._check_socket(service.label, parse_address(service.workers.worker_socket, "worker_socket"))
        return service

    def _check_socket(self, label: str, address: WorkerAddress) -> None:
        """Raise SettingsError for a socket to which strangers could attach as workers: workers send no token."""
        if not (address.path or self._allow_tcp_workers):
            raise SettingsError(
                f"{label}: worker_socket={str(address)!r}: must be unix:PATH, as the server has a control token, which workers do not send"
            )
        if not (address.is_local or self._allow_remote_workers):
            raise SettingsError(
                f"{label}: worker_socket={str(address)!r}: must be unix:PATH or on a loopback address, as workers send no token; "
                "a server started with --allow-control lets them attach from other machines"
            )


def _check_arguments(service: Service) -> None:
    """Raise SettingsError for arguments that the model's constructor does not take, before any worker is started."""
    signature = inspect.signature(service.facts.model)
    try:
        signature.bind(**service.params)
    except TypeError as error:
        raise SettingsError(
            f"{service.label}: params={redacted(service.params)!r}: {error}; {service.facts.model.__name__} takes {signature.replace(return_annotation=signature.empty)}"
        ) from error


Target = str | type[Model] | type[Service]

# These override the settings of a service that is measured. A profile describes one worker, and no policy may be needed for it:
# the service's own policy may be waiting for this very profile.
MEASURED_WITH = {**ONE_WORKER, "policy": "greedy"}


def for_measuring(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a service as those of one worker, which has as many threads as each of its workers would have."""
    alone = {**settings, **MEASURED_WITH}
    if (
        settings.get("executor", "process") == "process"
        and "workers" in settings
        and "OMP_NUM_THREADS" not in os.environ
    ):
        served = WorkerSettings(workers=settings["workers"], cpu_affinity=settings.get("cpu_affinity", []))
        alone.setdefault("threads", share_of_cpus(served, 0))
    return alone


_OWN = {declared.name for declared in fields(ProfilingSettings)}


def profile(
    model: Target,
    *,
    params: dict[str, Any] | None = None,
    items: Iterable[Any] | str | Path | None = None,
    progress: Progress = lambda share, what: None,
    **settings: Any,
) -> Profile:
    """Measure `model` and return its profile.

    Arguments:
        model: a class, or a text like "module:Class".
        params: arguments for the model's constructor.
        items: what batches are made of, or the path of a file of items (see profiling/); without them, the model's
            examples.
        progress: is called with the share that is done, from 0 to 1, and what is being done.
        settings: those of a measurement (`sizes`, `seconds`, `confidence`, `power`, `seed`), and those of Service, which should
            be the ones that will serve: `max_batch_size`, `pipeline_depth`, `spin`, `executor`, `threads` and so on. One
            worker is measured, whatever `workers` is.

    This also works while an event loop is running, such as a notebook's, which is blocked meanwhile.
    Raises SettingsError for what cannot be run or measured, and ModelError when the model fails.
    """
    own = ProfilingSettings(**{name: settings.pop(name) for name in _OWN & settings.keys()})
    found = load_target(model) if isinstance(model, str) else model
    service = new_service(found, params=params, **for_measuring(settings))
    return profile_service(service, own, items=items, progress=progress)


def profile_service(
    service: Service,
    settings: ProfilingSettings,
    *,
    items: Iterable[Any] | str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    progress: Progress = lambda share, what: None,
) -> Profile:
    """Measure one worker of `service`, which must not have been started, and return its profile.

    `about` has facts to add to the profile. For the other arguments, and for what is raised, see `profile`.
    """
    if chain_of(service) is not None:
        raise SettingsError(f"{service.label}: a chain computes nothing itself: measure the models of its steps")
    values = read_items(Path(items)) if isinstance(items, (str, Path)) else items
    chosen = items_of(service.facts.model, values, seed=settings.seed)
    grid(service.facts.batching.max_batch_size, settings.sizes)  # raises for wrong sizes before anything is started
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
    """Return the facts that a profile records about its model, machine and workers."""
    kind = service.facts.model
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
    meters = find_meters(worker_environment(service)) if settings.power is None else NO_METERS
    progress(0.0, "loading")
    measuring = Measuring(service.executor)
    try:
        await service.executor.start(measuring)
        return await measure(
            measuring,
            items,
            service.facts.batching.max_batch_size,
            settings,
            meters=meters,
            about=about,
            progress=progress,
        )
    finally:
        await service.executor.stop()


def _run(main: Any) -> Profile:
    with asyncio.Runner(loop_factory=new_loop) as runner:  # the event loop that serves
        profile: Profile = runner.run(main())
        return profile
