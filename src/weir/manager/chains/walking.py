"""One item's way through the steps of a chain."""

import asyncio
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from weir.errors import DeadlineExceeded, InvalidRequest, ModelError, ModelNotFound, ModelNotReady, WeirError, brief
from weir.manager.call import Call
from weir.manager.chains.steps import Branch, Step, Steps, Switch, as_step, name_of
from weir.messages import Request
from weir.model import is_tensor_model

if TYPE_CHECKING:
    from weir.manager.service import Service

Find = Callable[[str, str], "Service"]


class Walk:
    """Goes on behalf of `request`: its deadline, priority and key hold at every step. `find` knows the models; `tensors`: the
    chain declares tensors."""

    def __init__(self, request: Request, find: Find, *, tensors: bool) -> None:
        self._request = request
        self._find = find
        self._tensors = tensors
        self._begun = False  # what has been computed already is worth some waiting

    async def go(self, steps: Steps, value: Any) -> Any:
        """Return what becomes of `value`. Raises the error of the step that fails; cancelling it withdraws what is under way."""
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
        """Put `payload` into the line of `service`. While that is full, a caller of this process waits, any other is told
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
        said = self._said(switch.on, value)
        try:
            path = switch.cases.get(said, switch.default)
        except TypeError:  # not hashable: no case either
            path = switch.default
        if path is None:
            raise InvalidRequest(f"switch: {brief(said, 100)}: must be one of {', '.join(map(repr, switch.cases))}")
        return path

    def _said(self, on: str | Callable[[Any], Any] | None, value: Any) -> Any:
        if on is None:
            return value
        if callable(on):
            return on(value)
        if not isinstance(value, Mapping) or on not in value:
            raise InvalidRequest(f"switch: there is no {on!r} in the item")
        return _only(on, value[on]) if self._tensors else value[on]

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


def _only(name: str, array: Any) -> Any:
    values = set(array.ravel().tolist())
    if len(values) != 1:
        raise InvalidRequest(f"tensor {name!r}: decides which way a request goes: its elements must be equal")
    said = values.pop()
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else said


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
