"""The platform `transformers`: a task and a model of Hugging Face, `hf:TASK=MODEL`, run by a pipeline of transformers."""

from pathlib import Path

from weir.catalog.repository.platforms import need, with_attributes
from weir.catalog.repository.transformers_model import TASKS, TransformersModel
from weir.catalog.sources import ModelToServe
from weir.catalog.targets import task_and_model
from weir.errors import SettingsError
from weir.model import Model
from weir.workers.source import declared


class TransformersPlatform:
    """The platform `transformers`: models of the Hugging Face hub, or folders that `save_pretrained` has written."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the pipeline of the task. Raises SettingsError; see Platform."""
        task, source = task_and_model(model.target)
        if task not in TASKS:
            raise SettingsError(
                f"{model.label}: hf:{task}: must be one of {', '.join(TASKS)}; for another task, write a class that calls its "
                "pipeline (for sentence vectors: weir embed serve)"
            )
        path = Path(source).expanduser()
        if path.is_dir():
            source = str(path.absolute())
        elif path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
            raise SettingsError(f"{model.label}: hf:{task}={source}: no folder {path.absolute()}")
        need("torch", "transformers", model)
        need("transformers", "transformers", model)
        attributes = {"task": task, "source": source, "examples": () if model.attributes else TASKS[task]}
        return with_attributes(declared(TransformersModel, attributes), model)
