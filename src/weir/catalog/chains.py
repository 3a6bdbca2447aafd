"""Chains: models whose steps are other models of the same server.

A chain has a queue of its own. A batch of a chain is what left that queue in one turn of the event loop. Each item then goes
through the steps separately and is answered as soon as its last step is done. Each step's model makes batches of its own.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple

from weir.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelNotReady,
    SettingsError,
    WeirError,
    brief,
)
from weir.messages import Batch, Events, Form, Request, Timing, child_of, label_of
from weir.model import Model, Tensor, is_batched, is_tensor_model
from weir.serving.calls import Call
from weir.serving.service import Service
from weir.workers.executor import Capabilities, ExecutorBase, Listener
from weir.workers.local import LocalState
from weir.workers.run.steps import Reader, Writer, model_error
from weir.workers.settings import ONE_WORKER
from weir.workers.timer import end_tasks

PLACES = 4096  # batches in flight at a time; in practice the queues of the steps' models are the limit


class ChainBatch:
    """A batch in flight. `tasks` has a task for each entry without a response, by the entry's index."""

    def __init__(self, batch: Batch, began: float) -> None:
        self.batch = batch
        self.began = began
        self.tasks: dict[int, asyncio.Task[None]] = {}


class ChainExecutor(ExecutorBase):
    """An executor that sends every item through the steps of `chain`. See the Executor protocol.

    `now` is the service's clock.
    """

    def __init__(self, chain: "ChainSteps", now: Callable[[], float]) -> None:
        self.chain = chain
        self._now = now
        self._batches: dict[int, ChainBatch] = {}
        self._state = LocalState(0)
        self._listener: Listener
        self._reader = Reader(chain.model(), (KeyboardInterrupt,))
        self._writer = Writer(chain.model(), (KeyboardInterrupt,), chain.label)

    @property
    def capabilities(self) -> Capabilities:
        """A chain is ready when its steps are; see Capabilities."""
        return Capabilities(unmet=self.chain.unmet)

    async def start(self, listener: Listener) -> None:
        """Check the steps, and report the one worker as ready. Raises SettingsError; see ChainSteps.check."""
        self._listener = listener
        self._state.state = "starting"
        self.chain.check()
        self._state.state = "ready"
        listener.worker_ready(0, PLACES)

    def run(self, worker: int, batch: Batch) -> None:
        """Start a task for each entry of `batch`."""
        under_way = self._batches[batch.batch_id] = ChainBatch(batch, self._now())
        self._state.in_flight += 1
        for index, request in enumerate(batch.requests):
            under_way.tasks[index] = asyncio.ensure_future(self._enter(under_way, index, request))

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Cancel these entries, which also cancels their requests at the steps' models."""
        under_way = self._batches.get(batch_id)
        for index in indices:
            task = under_way.tasks.pop(index, None) if under_way is not None else None
            if task is not None and under_way is not None:
                task.cancel()
                self._ended(under_way, [], [])

    async def stop(self) -> None:
        """Cancel everything in flight."""
        self._state.state = "stopped"
        tasks = [task for each in self._batches.values() for task in each.tasks.values()]
        self._batches.clear()
        await end_tasks(*tasks)

    def states(self) -> Sequence[LocalState]:
        """Return the state of the one worker that stands for all steps."""
        return [self._state]

    async def _enter(self, under_way: ChainBatch, index: int, request: Request) -> None:
        batch = under_way.batch
        try:
            output = await self._output(
                request, batch.payloads[index], _type_of(batch.content_types, index), _type_of(batch.accepts, index)
            )
        except WeirError as error:
            output = error
        except Exception as error:
            output = model_error("the chain", error)
        if under_way.tasks.pop(index, None) is not None and self._batches.get(batch.batch_id) is under_way:
            self._ended(under_way, [index], [output])

    async def _output(self, request: Request, payload: Any, content_type: str, accept: str) -> Any:
        column = self._reader.read([payload], content_type)
        if isinstance(column[0], WeirError):
            return column[0]
        heads = self._reader.heads(column, content_type)
        response = await self.chain.response(request, column[0])
        return self._writer.write([response], accept, heads)[0]

    def _ended(self, under_way: ChainBatch, indices: list[int], outputs: list[Any]) -> None:
        final = not under_way.tasks
        batch_id = under_way.batch.batch_id
        timing = Timing(0.0, self._now() - under_way.began, 0.0) if final else None
        if final:
            del self._batches[batch_id]
            self._state.in_flight -= 1
        if final or indices:
            events = Events(batch_id, outputs, indices=indices, final=final, timing=timing)
            # Not at once: the code that cancelled the entry is still running.
            asyncio.get_running_loop().call_soon(self._listener.received, 0, events)


def _type_of(types: str | list[str], index: int) -> str:
    return types if isinstance(types, str) else types[index]


class Step(NamedTuple):
    """One call of one model.

    Arguments:
        model: a name, or a Service that someone else starts and stops.
        version: "" is the default version.
        inputs: in a chain of tensors, the name in the chain by the name of the model's input.
        outputs: in a chain of tensors, the name in the chain by the name of the model's output.

    A tensor that `inputs` or `outputs` does not list has the same name in the model and in the chain.
    """

    model: str | Service
    version: str = ""
    inputs: Mapping[str, str] = {}
    outputs: Mapping[str, str] = {}


class Branch(NamedTuple):
    """Sends the same item through all `paths` at the same time. The result is a dict with the response of each path.

    With `fail_fast`, the first error fails the item, and the other paths are cancelled. Without it, the response of a failed path
    is `{"error": text, "type": class}`; if all paths fail, the first path's error fails the item. In a chain of tensors, the
    tensors of each path are added to those of the chain.
    """

    paths: Mapping[str, "Steps"]
    fail_fast: bool = True


class Switch(NamedTuple):
    """Sends the item through the path that `cases` has for a value of the item, or else through `default`.

    `on` says which value: a key of the item (a dict), a function of the item, or None for the item itself. In a chain of tensors
    it is the name of a tensor, all of whose elements must be equal. A value that is not in `cases` is refused with
    InvalidRequest if there is no `default`.
    """

    on: str | Callable[[Any], Any] | None
    cases: Mapping[Any, "Steps"]
    default: "Steps | None" = None


Part = Step | Branch | Switch | str | Service
Steps = Sequence[Part]


def paths_of(part: Branch | Switch) -> list[Steps]:
    """Return all paths of a branch or a switch."""
    if isinstance(part, Branch):
        return list(part.paths.values())
    return [*part.cases.values(), *([] if part.default is None else [part.default])]


def steps_in(steps: Steps) -> Iterator[Step]:
    """Yield every step, including those inside branches and switches."""
    for part in steps:
        if isinstance(part, (Branch, Switch)):
            for path in paths_of(part):
                yield from steps_in(path)
        else:
            yield as_step(part)


def as_step(part: Step | str | Service) -> Step:
    """Return `part` as a Step: a name or a Service becomes a step without further settings."""
    return part if isinstance(part, Step) else Step(part)


def check_steps(steps: Any, label: str, *, tensors: bool) -> None:
    """Raise SettingsError unless `steps` is a valid list of steps for a chain of items, or with `tensors` of tensors."""
    if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
        raise SettingsError(f"{label}: steps={steps!r:.100}: must be a list of at least one step")
    for part in steps:
        if isinstance(part, (Branch, Switch)):
            _check_paths(part, label, tensors)
            for path in paths_of(part):
                check_steps(path, label, tensors=tensors)
        elif not tensors and isinstance(part, Step) and (part.inputs or part.outputs):
            rule = f"{label}: step {name_of(part)!r}: inputs and outputs are for chains that declare tensors"
            raise SettingsError(rule)
        elif not isinstance(part, (Step, str, Service)):
            raise SettingsError(f"{label}: {part!r:.100}: is not a step: must be a name, a Step, a Branch or a Switch")


def _check_paths(part: Branch | Switch, label: str, tensors: bool) -> None:
    if not paths_of(part):
        raise SettingsError(f"{label}: {type(part).__name__}: must have at least one path")
    if isinstance(part, Branch) and tensors and not part.fail_fast:
        raise SettingsError(f"{label}: fail_fast=False: a chain of tensors has all its outputs or an error")
    if isinstance(part, Switch) and tensors and not isinstance(part.on, str):
        raise SettingsError(f"{label}: Switch.on={part.on!r:.100}: must be the name of a tensor")


def name_of(step: Step) -> str:
    """Return the name of a step as messages show it."""
    if not isinstance(step.model, str):
        return step.model.label
    return label_of(step.model, step.version)


Find = Callable[[str, str], Service]


class ItemWalk:
    """Takes one item through the steps on behalf of `request`, whose deadline, priority and key hold at every step.

    `find` finds the models; `tensors` tells whether the chain declares tensors.
    """

    def __init__(self, request: Request, find: Find, *, tensors: bool) -> None:
        self._request = request
        self._find = find
        self._tensors = tensors
        self._begun = False  # a later step waits for a full queue rather than lose what is already computed

    async def go(self, steps: Steps, value: Any) -> Any:
        """Return the result of `steps` for `value`. Raises the error of the step that fails. Cancelling the coroutine cancels
        its requests."""
        for part in steps:
            if isinstance(part, Branch):
                value = await self._branch(part, value)
            elif isinstance(part, Switch):
                value = await self.go(self._chosen(part, value), value)
            else:
                value = await self._step(as_step(part), value)
        return value

    async def _step(self, step: Step, value: Any) -> Any:
        try:
            service = service_of(step, self._find)
        except ModelNotFound as error:
            raise ModelNotReady(f"step {name_of(step)!r}: {error.message}") from error
        try:
            if not self._tensors:
                return await self._call(service, value)
            response = await self._call(service, _given(step, service, value))
        except WeirError as error:
            raise _at(name_of(step), error) from error
        return {**value, **{step.outputs.get(output, output): array for output, array in response.items()}}

    def _call(self, service: Service, payload: Any) -> Call:
        """Put `payload` into the queue of `service`. If the queue is full, a caller in this process waits; any other caller gets
        Overloaded at the first step, and waits at later steps."""
        request, now = self._request, service.now()
        left = request.deadline - now
        if left <= 0:
            raise DeadlineExceeded(f"no response within the timeout of {request.form.timeout:g} s")
        asked = request.form
        key = None if self._tensors else asked.key
        form = Form(left, key=key, priority=asked.priority, frontend=asked.frontend, caller=asked.caller)
        call = Call(loop=asyncio.get_running_loop()).prepare(form, payload, now, service.cancel)
        call.deadline = request.deadline
        call.trace = child_of(request.trace)
        service.enter(call, self._begun or asked.frontend == "python")
        self._begun = True
        return call

    def _chosen(self, switch: Switch, value: Any) -> Steps:
        found = self._switch_value(switch.on, value)
        try:
            path = switch.cases.get(found, switch.default)
        except TypeError:  # the value is not hashable, so it cannot be a case
            path = switch.default
        if path is None:
            raise InvalidRequest(f"switch: {brief(found, 100)}: must be one of {', '.join(map(repr, switch.cases))}")
        return path

    def _switch_value(self, on: str | Callable[[Any], Any] | None, value: Any) -> Any:
        if on is None:
            return value
        if callable(on):
            return on(value)
        if not isinstance(value, Mapping) or on not in value:
            raise InvalidRequest(f"switch: there is no {on!r} in the item")
        return _single_value(on, value[on]) if self._tensors else value[on]

    async def _branch(self, branch: Branch, value: Any) -> Any:
        tasks = {name: asyncio.ensure_future(self.go(path, value)) for name, path in branch.paths.items()}
        when = asyncio.FIRST_EXCEPTION if branch.fail_fast else asyncio.ALL_COMPLETED
        try:
            await asyncio.wait(tasks.values(), return_when=when)
            if branch.fail_fast:
                for task in tasks.values():
                    if task.done():
                        task.result()
            responses = _responses(tasks)
        finally:
            await end_tasks(*tasks.values())
        return dict(each for path in responses.values() for each in path.items()) if self._tensors else responses


def service_of(step: Step, find: Find) -> Service:
    """Return the service that runs `step` now. Raises ModelNotFound."""
    return find(step.model, step.version) if isinstance(step.model, str) else step.model


def _given(step: Step, service: Service, value: Mapping[str, Any]) -> dict[str, Any]:
    if not service.facts.takes_tensors:
        raise ModelError("takes items, and the chain has tensors")
    given = {}
    for tensor in service.facts.model.inputs:
        source = step.inputs.get(tensor.name, tensor.name)
        if source not in value:
            raise ModelError(f"input {tensor.name!r}: the chain has no tensor {source!r}; it has {', '.join(value)}")
        given[tensor.name] = value[source]
    return given


def _single_value(name: str, array: Any) -> Any:
    values = set(array.ravel().tolist())
    if len(values) != 1:
        raise InvalidRequest(f"tensor {name!r}: decides which way a request goes, so its elements must be equal")
    found = values.pop()
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


def _responses(tasks: Mapping[str, "asyncio.Future[Any]"]) -> dict[str, Any]:
    """Return the response or the error of each path. Raises the first path's error if all paths have failed."""
    responses = {name: _response(task) for name, task in tasks.items()}
    for task in tasks.values():
        if task.exception() is None:
            return responses
    return {name: task.result() for name, task in tasks.items()}


def _response(task: "asyncio.Future[Any]") -> Any:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, WeirError):
        raise error
    return {"error": error.message, "type": type(error).__name__}


def _at(name: str, error: WeirError) -> WeirError:
    placed = copy(error)
    placed.message = f"step {name!r}: {error.message}"
    placed.args = (placed.message,)
    return placed


CAPACITY = {"capacity": 4096}  # default for the items in all steps together
FORCED = {"policy": "greedy", **ONE_WORKER}  # a chain has no worker that a policy could wait for


class Chained(Model):
    """Declares a chain's tensors and examples. It computes nothing: the models of the steps do."""

    def preprocess(self, item: Any) -> Any:
        """Return the item. Overriding this makes the requests arrive one by one, as a chain needs them."""
        return item

    def predict(self, batch: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError("a chain computes nothing itself; the models of its steps do")


class Chain(Service):
    """Serves a chain of models under a name of its own; its steps are found in the Registry that it is put into.

        class Captions(weir.Chain):
            steps = ["describe", weir.Branch({"english": ["polish"], "german": ["translate"]})]

    A chain calls each step as any other caller does: the step has its own workers, and batches the chain's items with those of
    other callers. An item that fails is answered at once. The timeout of a request covers all steps together, and cancelling the
    request cancels it at the step where it is.

    The item goes into the first step, each step's response goes into the next step, and the last step's response is the chain's. With
    `inputs` and `outputs` it is a chain of tensors: each step takes the tensors that it declares, by name, and adds its outputs.

    The arguments override the class attributes of the same names; the others are those of Service, of which `policy` and
    `workers` have no effect. Raises SettingsError for invalid steps.
    """

    model = Chained
    steps: ClassVar[Steps] = ()
    inputs: ClassVar[Sequence[Tensor]] = ()
    outputs: ClassVar[Sequence[Tensor]] = ()
    examples: ClassVar[Sequence[Any]] = ()

    def __init__(
        self,
        steps: Steps | None = None,
        *,
        name: str | None = None,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        **settings: Any,
    ) -> None:
        kind = type(self)
        attributes = {
            "inputs": kind.inputs if inputs is None else inputs,
            "outputs": kind.outputs if outputs is None else outputs,
            "examples": kind.examples,
        }
        model = type(kind.__name__, (Chained,), attributes)
        name = name or kind.__name__.lower()
        chain = ChainSteps(kind.steps if steps is None else steps, name, settings.get("version", ""), model)
        executor = ChainExecutor(chain, settings.setdefault("clock", time.monotonic))
        options: dict[str, Any] = {**CAPACITY, **settings, **FORCED, "name": name, "executor": executor}
        super().__init__(model, **options)


class ChainSteps:
    """The steps of one chain: which models they need, whether they fit together, and how they compute an item.

    `model` declares the tensors of the chain. `find` returns the service of a name and a version ("": the default one); the
    Registry sets it. Raises SettingsError for invalid steps.
    """

    def __init__(self, parts: Steps, name: str, version: str, model: type[Model]) -> None:
        self.parts = parts
        self.name = name
        self.label = label_of(name, version)
        self.model = model
        self.find: Find = _nowhere
        self._tensors = is_tensor_model(model)
        check_steps(parts, name, tensors=self._tensors)

    def needs(self, name: str, versions: Collection[str] | None = None) -> bool:
        """Return whether a step is the model `name`; with `versions`, whether a step names one of these versions of it."""
        steps = [step for step in steps_in(self.parts) if step.model == name]
        return any(versions is None or (step.version and step.version in versions) for step in steps)

    def unmet(self) -> str:
        """Return why a step does not accept requests; "" if all steps do."""
        for step in steps_in(self.parts):
            try:
                reason = service_of(step, self.find).not_ready_reason
            except ModelNotFound:
                reason = "not loaded"
            if reason:
                return f"step {name_of(step)!r} is not ready: {reason}"
        return ""

    async def response(self, request: Request, item: Any) -> Any:
        """Return the chain's response to `item`, on behalf of `request`. Raises the error of the step that fails."""
        response = await ItemWalk(request, self.find, tensors=self._tensors).go(self.parts, item)
        return self._declared(response) if self._tensors else response

    def _declared(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return those of `tensors` that are the chain's outputs, in the datatypes that it declares."""
        from weir.wire.tensors import to_arrays  # only tensors need numpy

        missing = [tensor.name for tensor in self.model.outputs if tensor.name not in tensors]
        if missing:
            raise ModelError(f"output {missing[0]!r}: no step has it; there are {', '.join(tensors)}")
        try:
            return to_arrays({tensor.name: tensors[tensor.name] for tensor in self.model.outputs}, self.model.outputs)
        except InvalidRequest as error:
            raise ModelError(f"the chain's outputs: {error.message}") from error

    def check(self, find: Find | None = None) -> None:
        """Raise SettingsError unless every step can be found, gives one response, leads into no circle, and gets the tensors that
        it needs.

        `find` is used instead of the Registry, to check how the chain would be with other models.
        """
        self._check_steps(self, (self.name,), find)
        if self._tensors:
            known = self._flow(self.parts, {tensor.name: tensor for tensor in self.model.inputs}, find or self.find)
            for tensor in self.model.outputs:
                self._check_fits(f"output {tensor.name!r}", tensor, tensor.name, known, is_batched(self.model))

    def _flow(self, steps: Steps, known: dict[str, Tensor], find: Find) -> dict[str, Tensor]:
        """Return the tensors that may exist after `steps`; `known` are those before them. Raises SettingsError."""
        for part in steps:
            if isinstance(part, (Branch, Switch)):
                for path in paths_of(part):
                    known = known | self._flow(path, known, find)
                continue
            step = as_step(part)
            model = service_of(step, find).model
            for tensor in model.inputs:
                what = f"step {name_of(step)!r}: input {tensor.name!r}"
                source = step.inputs.get(tensor.name, tensor.name)
                self._check_fits(what, tensor, source, known, is_batched(model))
            known = known | {step.outputs.get(tensor.name, tensor.name): tensor for tensor in model.outputs}
        return known

    def _check_fits(self, what: str, tensor: Tensor, source: str, known: dict[str, Tensor], batched: bool) -> None:
        if source not in known:
            rule = f"{self.label}: {what}: no tensor {source!r} is available here; there are {', '.join(known)}"
            raise SettingsError(rule)
        given = known[source]
        if given.datatype != tensor.datatype:
            raise SettingsError(f"{self.label}: {what}: is {tensor.datatype}, {source!r} is {given.datatype} there")
        lengths = zip(given.shape, tensor.shape, strict=False)
        is_alike = len(given.shape) == len(tensor.shape) and all(-1 in pair or len(set(pair)) == 1 for pair in lengths)
        if batched == is_batched(self.model) and not is_alike:
            rule = f"{self.label}: {what}: has shape {list(tensor.shape)}, {source!r} has {list(given.shape)} there"
            raise SettingsError(rule)

    def _check_steps(self, chain: "ChainSteps", above: tuple[str, ...], find: Find | None) -> None:
        for step in steps_in(chain.parts):
            try:
                service = service_of(step, find or chain.find)
            except ModelNotFound as error:
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: {error.message}") from error
            if service.facts.streaming:
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: streams, a step gives one response")
            if self._tensors and not service.facts.takes_tensors:
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: takes items, the chain has tensors")
            if self._tensors and is_batched(self.model) and not is_batched(service.facts.model):
                raise SettingsError(
                    f"{self.label}: step {name_of(step)!r}: cannot batch, but the chain accepts batches: the chain must have "
                    "max_batch_size 0 (or tensors with batch='none') too"
                )
            if service.name in above:
                raise SettingsError(f"{self.label}: steps lead in a circle: {' -> '.join((*above, service.name))}")
            if (inner := chain_of(service)) is not None:
                self._check_steps(inner, (*above, service.name), find)


def chain_of(service: Service) -> ChainSteps | None:
    """Return the steps of the chain that `service` serves; None if it serves no chain."""
    executor = service.generation.executor
    return executor.chain if isinstance(executor, ChainExecutor) else None


def _nowhere(name: str, version: str) -> Service:
    raise ModelNotFound(f"model {name!r}: the chain is in no Registry, where its steps could be found by name")


def dependents(name: str, services: Iterable[Service], versions: Collection[str] | None = None) -> list[ChainSteps]:
    """Return the chains among `services` that have the model `name` as a step; with `versions`, only those that name one of
    these versions of it."""
    return [chain for chain in map(chain_of, services) if chain is not None and chain.needs(name, versions)]


def missing(services: Iterable[Service], running: Collection[str]) -> list[str]:
    """Return the names of the models that are steps of chains among `services` and not in `running`, each once."""
    chains = [chain for chain in map(chain_of, services) if chain is not None]
    names = [step.model for chain in chains for step in steps_in(chain.parts) if isinstance(step.model, str)]
    return [name for name in dict.fromkeys(names) if name not in running]


def stop_order(services: Sequence[Service]) -> list[list[Service]]:
    """Return `services` in groups, in the order in which the groups may be stopped: a chain comes before its steps."""
    left, groups = list(services), []
    while left:
        group = [service for service in left if not dependents(service.name, left)] or left
        groups.append(group)
        left = [service for service in left if service not in group]
    return groups
