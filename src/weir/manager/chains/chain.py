"""A model that is made of other models."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from weir.errors import InvalidRequest, ModelError, ModelNotFound, SettingsError
from weir.manager.chains.executor import ChainExecutor
from weir.manager.chains.steps import Branch, Steps, Switch, as_step, check_steps, name_of, paths_of, steps_in
from weir.manager.chains.walking import Find, Walk, service_of
from weir.manager.service import Service
from weir.messages import Dispatch, Request
from weir.model import Model, Tensor, is_batched, is_tensor_model

# Items under way in all steps together, unless it is said: the queues of later steps are long.
CAPACITY = {"capacity": 4096}
FORCED = {"policy": "greedy", "workers": 1}  # a chain has no worker that a policy could wait for


class Chained(Model):
    """What a chain declares. There is no worker that makes an instance do anything."""

    def preprocess(self, item: Any) -> Any:
        """Return the item. Whoever overrides this gets the requests one by one, as a chain needs them."""
        return item

    def predict(self, batch: Any) -> Any:
        """Refuse it."""
        raise NotImplementedError("a chain asks the models of its steps")


class Chain(Service):
    """Serves a chain of models under a name of its own; its steps are found in the Registry that it is put into.

        class Captions(weir.Chain):
            steps = ["describe", weir.Branch({"english": ["polish"], "german": ["translate"]})]

    Each step is asked as by any other caller: it has its own workers, and batches the chain's items with everybody's. An item
    that fails leaves at once. The timeout of a request holds for all steps together, and whoever withdraws it withdraws it from
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
        outputs: Sequence[Tensor] | None = None, **said: Any,
    ) -> None:  # fmt: skip
        kind = type(self)
        attributes = {
            "inputs": kind.inputs if inputs is None else inputs,
            "outputs": kind.outputs if outputs is None else outputs, "examples": kind.examples,
        }  # fmt: skip
        model = type(kind.__name__, (Chained,), attributes)
        self.parts: Steps = kind.steps if steps is None else steps
        self._registry_get = _nowhere
        self._tensors = is_tensor_model(model)
        label = name or kind.__name__.lower()
        check_steps(self.parts, label, tensors=self._tensors)
        version = said.get("version", "")
        executor = ChainExecutor(
            model, f"{label}/{version}" if version else label, self._way, self._dispatch, self.now, self.check
        )
        super().__init__(model, **{**CAPACITY, **said, **FORCED, "name": name, "executor": executor})

    def join(self, find: Any) -> None:
        """Have steps be found by `find`, of a name and a version ("": the default one)."""
        self._registry_get = find

    def needs(self, name: str, versions: Collection[str] | None = None) -> bool:
        """Tell whether a step is the model `name`; with `versions`, whether it names one of these."""
        steps = [step for step in steps_in(self.parts) if step.model == name]
        return any(versions is None or (step.version and step.version in versions) for step in steps)

    @property
    def not_ready_reason(self) -> str:
        """Why no requests are taken; "" if they are. A chain is as ready as its steps."""
        return super().not_ready_reason or self._waits_for()

    def _waits_for(self) -> str:
        for step in steps_in(self.parts):
            try:
                reason = service_of(step, self._registry_get).not_ready_reason
            except ModelNotFound:
                reason = "not loaded"
            if reason:
                return f"step {name_of(step)!r} is not ready: {reason}"
        return ""

    async def _way(self, request: Request, item: Any) -> Any:
        answer = await Walk(request, self._registry_get, tensors=self._tensors).go(self.parts, item)
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

    def _dispatch(self, batch_id: int) -> Dispatch | None:
        return self._driver.batcher.dispatch_of(batch_id)

    def check(self, find: Find | None = None) -> None:
        """Raise SettingsError unless each step is there, gives one answer, does not lead back here, and has its tensors. `find`
        knows the models instead of the Registry, to tell what would be so with others."""
        self._check_steps(self, (self.name,), find)
        if self._tensors:
            there = self._flow(
                self.parts, {tensor.name: tensor for tensor in self.model.inputs}, find or self._registry_get
            )
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

    def _check_steps(self, chain: "Chain", way: tuple[str, ...], find: Find | None) -> None:
        for step in steps_in(chain.parts):
            try:
                service = service_of(step, find or chain._registry_get)
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
            if isinstance(service, Chain):
                self._check_steps(service, (*way, service.name), find)


def _nowhere(name: str, version: str) -> Service:
    raise ModelNotFound(f"model {name!r}: the chain is in no Registry, where its steps could be found by name")
