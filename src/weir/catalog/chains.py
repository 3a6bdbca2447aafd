"""Chains: models whose steps are other models of the same server.

A batch of a chain is what left the chain's own queue in one turn of the loop; each of its items goes its own way through the steps, and leaves as soon as
it has its end. How the items of many batches are put together again is up to the models of the steps.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple, Union

from weir.batching.collate import entries_of
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
from weir.messages import Batch, EventKind, Events, Request, Timing
from weir.model import Model, Tensor, is_batched, is_tensor_model
from weir.serving.calls import Call
from weir.serving.generation import Generation
from weir.serving.service import Service
from weir.workers.executor import ExecutorBase, Listener
from weir.workers.local import LocalState
from weir.workers.run.codecs import Reader, Writer
from weir.workers.run.steps import model_error

PLACES = 4096  # batches under way at a time; what the models' own lines hold is the true limit


class ChainBatch:
    """A batch: the task of each entry that has no end yet."""

    def __init__(self, batch: Batch, began: float) -> None:
        self.batch = batch
        self.began = began
        self.tasks: dict[int, asyncio.Task[None]] = {}


class ChainExecutor(ExecutorBase):
    """Sends every item through the steps of `chain`. `now` is the service's clock; `generation`, which is set before the start, knows
    the requests of a batch. See the Executor protocol."""

    generation: Generation

    def __init__(self, chain: "ChainSteps", now: Callable[[], float]) -> None:
        self.chain = chain
        self._now = now
        self._batches: dict[int, ChainBatch] = {}
        self._state = LocalState(0)
        self._listener: Listener
        self._reader = Reader(chain.model(), (KeyboardInterrupt,))
        self._writer = Writer(chain.model(), (KeyboardInterrupt,), chain.label)

    async def start(self, listener: Listener) -> None:
        """See that the steps can be. Raises SettingsError."""
        self._listener = listener
        self._state.state = "starting"
        self.chain.check()
        self._state.state = "ready"
        listener.worker_ready(0, PLACES)

    def run(self, worker: int, batch: Batch) -> None:
        """Send the entries of `batch` on their way."""
        dispatch = self.generation.driver.batcher.dispatch_of(batch.batch_id)
        if dispatch is None:
            return
        under_way = self._batches[batch.batch_id] = ChainBatch(batch, self._now())
        self._state.in_flight += 1
        for index, (request, _, _) in enumerate(entries_of(dispatch)):
            under_way.tasks[index] = asyncio.ensure_future(self._enter(under_way, index, request))

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Withdraw these entries from the lines that they are in."""
        under_way = self._batches.get(batch_id)
        for index in indices:
            task = under_way.tasks.pop(index, None) if under_way is not None else None
            if task is not None and under_way is not None:
                task.cancel()
                self._ended(under_way, [], [])

    async def stop(self) -> None:
        """Withdraw all that is under way."""
        self._state.state = "stopped"
        tasks = [task for each in self._batches.values() for task in each.tasks.values()]
        self._batches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def states(self) -> Sequence[LocalState]:
        """Return the state of what stands for the worker."""
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
        answer = await self.chain.answer(request, column[0])
        return self._writer.write([answer], accept, heads)[0]

    def _ended(self, under_way: ChainBatch, indices: list[int], outputs: list[Any]) -> None:
        final = not under_way.tasks
        batch_id = under_way.batch.batch_id
        kinds = [EventKind.ERROR if isinstance(output, WeirError) else EventKind.DONE for output in outputs]
        timing = Timing(0.0, self._now() - under_way.began, 0.0) if final else None
        if final:
            del self._batches[batch_id]
            self._state.in_flight -= 1
        if final or indices:
            events = Events(batch_id, outputs, indices=indices, kinds=kinds, final=final, timing=timing)
            # Not at once: the code that cancelled it is still running.
            asyncio.get_running_loop().call_soon(self._listener.received, 0, events)


def _type_of(types: str | list[str], index: int) -> str:
    return types if isinstance(types, str) else types[index]


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


Find = Callable[[str, str], "Service"]


class ItemWalk:
    """Goes on behalf of `request`: its deadline, priority and key hold at every step. `find` knows the models; `tensors`: the
    chain declares tensors."""

    def __init__(self, request: Request, find: Find, *, tensors: bool) -> None:
        self._request = request
        self._find = find
        self._tensors = tensors
        self._begun = False  # what has been computed already is worth some waiting

    async def go(self, steps: Steps, value: Any) -> Any:
        """Return what becomes of `value`. Raises the error of the step that fails; cancelling it withdraws the requests under way."""
        for part in steps:
            if isinstance(part, Branch):
                value = await self._branch(part, value)
            elif isinstance(part, Switch):
                value = await self.go(self._chosen(part, value), value)
            else:
                value = await self._step(as_step(part), value)
        return value

    async def _step(self, step: Step, value: Any) -> Any:
        name = name_of(step)
        try:
            service = service_of(step, self._find)
            if not self._tensors:
                return await self._asked(service, value)
            answer = await self._asked(service, _given(step, service, value))
        except ModelNotFound as error:
            raise ModelNotReady(f"step {name!r}: {error.message}") from error
        except WeirError as error:
            raise _at(name, error) from error
        return {**value, **{step.outputs.get(output, output): array for output, array in answer.items()}}

    def _asked(self, service: "Service", payload: Any) -> Call:
        """Put `payload` into the queue of `service`. While that is full, a caller of this process waits, any other is told
        so at his first step."""
        request, now = self._request, service.now()
        left = request.deadline - now
        if left <= 0:
            raise DeadlineExceeded(f"no answer within the timeout of {request.timeout:g} s")
        call = Call(payload, now, left, asyncio.get_running_loop(), service.cancel)
        call.deadline = request.deadline
        call.priority = request.priority
        call.door = request.door
        call.trace = getattr(request.trace, "traceparent", request.trace)
        if not self._tensors:
            call.key = request.key
        service.enter(call, self._begun or request.door == "python")
        self._begun = True
        return call

    def _chosen(self, switch: Switch, value: Any) -> Steps:
        found = self._switch_value(switch.on, value)
        try:
            path = switch.cases.get(found, switch.default)
        except TypeError:  # not hashable: no case either
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
            answers = _answers(tasks)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return _merged(answers) if self._tensors else answers


def service_of(step: Step, find: Find) -> "Service":
    """Return the service that runs `step` now. Raises ModelNotFound."""
    return find(step.model, step.version) if isinstance(step.model, str) else step.model


def _given(step: Step, service: "Service", value: Mapping[str, Any]) -> dict[str, Any]:
    if not is_tensor_model(service.model):
        raise ModelError("takes items, and the chain has tensors")
    given = {}
    for tensor in service.model.inputs:
        source = step.inputs.get(tensor.name, tensor.name)
        if source not in value:
            raise ModelError(f"input {tensor.name!r}: the chain has no tensor {source!r}; it has {', '.join(value)}")
        given[tensor.name] = value[source]
    return given


def _single_value(name: str, array: Any) -> Any:
    values = set(array.ravel().tolist())
    if len(values) != 1:
        raise InvalidRequest(f"tensor {name!r}: decides which way a request goes: its elements must be equal")
    found = values.pop()
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


def _answers(tasks: Mapping[str, "asyncio.Future[Any]"]) -> dict[str, Any]:
    """Return what came of each path. Raises the first error where all have failed: there is no answer then."""
    answers = {name: _answer(task) for name, task in tasks.items()}
    for task in tasks.values():
        if task.exception() is None:
            return answers
    return {name: task.result() for name, task in tasks.items()}


def _answer(task: "asyncio.Future[Any]") -> Any:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, WeirError):
        raise error
    return {"error": error.message, "type": type(error).__name__}


def _merged(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: array for path in answers.values() for name, array in path.items()}


def _at(name: str, error: WeirError) -> WeirError:
    placed = copy(error)
    placed.message = f"step {name!r}: {error.message}"
    placed.args = (placed.message,)
    return placed


# Default for the items under way in all steps together: the queues of later steps are long.
CAPACITY = {"capacity": 4096}
FORCED = {"policy": "greedy", "workers": 1}  # a chain has no worker that a policy could wait for


class Chained(Model):
    """What a chain declares. There is no worker that makes an instance do anything."""

    def preprocess(self, item: Any) -> Any:
        """Return the item. A model that overrides this gets the requests one by one, as a chain needs them."""
        return item

    def predict(self, batch: Any) -> Any:
        """Refuse it."""
        raise NotImplementedError("a chain asks the models of its steps")


class Chain(Service):
    """Serves a chain of models under a name of its own; its steps are found in the Registry that it is put into.

        class Captions(weir.Chain):
            steps = ["describe", weir.Branch({"english": ["polish"], "german": ["translate"]})]

    A chain calls each step as any other caller does: the step has its own workers, and batches the chain's items with those of other callers. An item
    that fails leaves at once. The timeout of a request holds for all steps together, and withdrawing it withdraws it from
    the step that it is at.

    The item goes into the first step, each step's answer into the next, the last one's answer is the chain's. With `inputs` and
    `outputs` it is a chain of tensors: these have names, each step takes those that it declares and adds its own.

    The arguments replace the class attributes of the same names; the others are those of Service. `policy` and `workers` mean
    nothing. Raises SettingsError for steps that cannot be.
    """

    model = Chained
    steps: ClassVar[Steps] = ()
    inputs: ClassVar[Sequence[Tensor]] = ()
    outputs: ClassVar[Sequence[Tensor]] = ()
    examples: ClassVar[Sequence[Any]] = ()

    def __init__(
        self, steps: Steps | None = None, *, name: str | None = None, inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        kind = type(self)
        attributes = {
            "inputs": kind.inputs if inputs is None else inputs,
            "outputs": kind.outputs if outputs is None else outputs, "examples": kind.examples,
        }  # fmt: skip
        model = type(kind.__name__, (Chained,), attributes)
        name = name or kind.__name__.lower()
        chain = ChainSteps(kind.steps if steps is None else steps, name, settings.get("version", ""), model)
        executor = ChainExecutor(chain, self.now)
        options: dict[str, Any] = {**CAPACITY, **settings, **FORCED, "name": name, "executor": executor}
        super().__init__(model, **options)
        executor.generation = self.generation
        self.generation.unmet = chain.unmet  # it is as ready as its steps


class ChainSteps:
    """The steps of one chain: what they need, whether they fit together, and an item's way through them.

    `find` finds the service of a step, of a name and a version ("": the default one); the Registry sets it. `model` declares the
    tensors of the chain. Raises SettingsError for steps that cannot be.
    """

    def __init__(self, parts: Steps, name: str, version: str, model: type[Model]) -> None:
        self.parts = parts
        self.name = name
        self.label = f"{name}/{version}" if version else name
        self.model = model
        self.find: Find = _nowhere
        self._tensors = is_tensor_model(model)
        check_steps(parts, name, tensors=self._tensors)

    def needs(self, name: str, versions: Collection[str] | None = None) -> bool:
        """Tell whether a step is the model `name`; with `versions`, whether it names one of these."""
        steps = [step for step in steps_in(self.parts) if step.model == name]
        return any(versions is None or (step.version and step.version in versions) for step in steps)

    def unmet(self) -> str:
        """Return why a step takes no requests; "" if all do."""
        for step in steps_in(self.parts):
            try:
                reason = service_of(step, self.find).not_ready_reason
            except ModelNotFound:
                reason = "not loaded"
            if reason:
                return f"step {name_of(step)!r} is not ready: {reason}"
        return ""

    async def answer(self, request: Request, item: Any) -> Any:
        """Return the chain's answer to `item`, on behalf of `request`. Raises the error of the step that fails."""
        answer = await ItemWalk(request, self.find, tensors=self._tensors).go(self.parts, item)
        return self._declared(answer) if self._tensors else answer

    def _declared(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the chain's outputs of all its tensors, as declared."""
        from weir.wire.tensors import to_arrays  # only tensors need numpy

        missing = [tensor.name for tensor in self.model.outputs if tensor.name not in tensors]
        if missing:
            raise ModelError(f"output {missing[0]!r}: no step has it; there are {', '.join(tensors)}")
        try:
            return to_arrays({tensor.name: tensors[tensor.name] for tensor in self.model.outputs}, self.model.outputs)
        except InvalidRequest as error:
            raise ModelError(f"the chain's outputs: {error.message}") from error

    def check(self, find: Find | None = None) -> None:
        """Raise SettingsError unless each step is there, gives one answer, does not lead back here, and has its tensors. `find`
        knows the models instead of the Registry, to tell what would be so with others."""
        self._check_steps(self, (self.name,), find)
        if self._tensors:
            there = self._flow(self.parts, {tensor.name: tensor for tensor in self.model.inputs}, find or self.find)
            for tensor in self.model.outputs:
                self._check_fits(f"output {tensor.name!r}", tensor, tensor.name, there, is_batched(self.model))

    def _flow(self, steps: Steps, there: dict[str, Tensor], find: Find) -> dict[str, Tensor]:
        """Return the tensors that there may be after `steps`, where those of `there` are before. Raises SettingsError."""
        for part in steps:
            if isinstance(part, (Branch, Switch)):
                for path in paths_of(part):
                    there = there | self._flow(path, there, find)
                continue
            step = as_step(part)
            model = service_of(step, find).model
            for tensor in model.inputs:
                what = f"step {name_of(step)!r}: input {tensor.name!r}"
                source = step.inputs.get(tensor.name, tensor.name)
                self._check_fits(what, tensor, source, there, is_batched(model))
            there = there | {step.outputs.get(tensor.name, tensor.name): tensor for tensor in model.outputs}
        return there

    def _check_fits(self, what: str, tensor: Tensor, source: str, there: dict[str, Tensor], batched: bool) -> None:
        if source not in there:
            raise SettingsError(
                f"{self.label}: {what}: no tensor {source!r} can be there; there are {', '.join(there)}"
            )
        given = there[source]
        if given.datatype != tensor.datatype:
            raise SettingsError(f"{self.label}: {what}: is {tensor.datatype}, {source!r} is {given.datatype} there")
        lengths = zip(given.shape, tensor.shape, strict=False)
        is_alike = len(given.shape) == len(tensor.shape) and all(-1 in pair or len(set(pair)) == 1 for pair in lengths)
        if batched == is_batched(self.model) and not is_alike:
            raise SettingsError(
                f"{self.label}: {what}: has shape {list(tensor.shape)}, {source!r} has {list(given.shape)} there"
            )

    def _check_steps(self, chain: "ChainSteps", way: tuple[str, ...], find: Find | None) -> None:
        for step in steps_in(chain.parts):
            try:
                service = service_of(step, find or chain.find)
            except ModelNotFound as error:
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: {error.message}") from error
            if service.streaming:
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: streams, a step gives one answer")
            if self._tensors and not is_tensor_model(service.model):
                raise SettingsError(f"{self.label}: step {name_of(step)!r}: takes items, the chain has tensors")
            if self._tensors and is_batched(self.model) and not is_batched(service.model):
                raise SettingsError(
                    f"{self.label}: step {name_of(step)!r}: cannot batch, and the chain divides and takes batches: it must have "
                    "max_batch_size 0 (or tensors with batch='none') too"
                )
            if service.name in way:
                raise SettingsError(f"{self.label}: steps lead in a circle: {' -> '.join((*way, service.name))}")
            if (inner := chain_of(service)) is not None:
                self._check_steps(inner, (*way, service.name), find)


def chain_of(service: Service) -> ChainSteps | None:
    """Return the steps of the chain that `service` serves; None if it serves no chain."""
    executor = service.generation.executor
    return executor.chain if isinstance(executor, ChainExecutor) else None


def _nowhere(name: str, version: str) -> Service:
    raise ModelNotFound(f"model {name!r}: the chain is in no Registry, where its steps could be found by name")


def dependents(name: str, services: Iterable[Service], versions: Collection[str] | None = None) -> list[ChainSteps]:
    """Return the chains among `services` of which the model `name` is a step; with `versions`, in one of these by its number."""
    return [chain for chain in map(chain_of, services) if chain is not None and chain.needs(name, versions)]


def missing(services: Iterable[Service], there: Collection[str]) -> list[str]:
    """Return the models that are steps of chains among `services` and not `there`, each once."""
    chains = [chain for chain in map(chain_of, services) if chain is not None]
    names = [step.model for chain in chains for step in steps_in(chain.parts) if isinstance(step.model, str)]
    return [name for name in dict.fromkeys(names) if name not in there]


def waves(services: Sequence[Service]) -> list[list[Service]]:
    """Return `services` such that a chain comes before its steps: those of one list may end at the same time."""
    left, found = list(services), []
    while left:
        first = [service for service in left if not dependents(service.name, left)] or left
        found.append(first)
        left = [service for service in left if service not in first]
    return found
