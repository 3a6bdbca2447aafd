"""The model that runs a pipeline of Hugging Face's transformers (the extra `transformers`), one task of texts."""

from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any, ClassVar

from weir.errors import InvalidRequest, SettingsError, brief
from weir.model import Model
from weir.text_models.checkpoint.hub import log_its_lines_once

GENERATION, FILL_MASK = "text-generation", "fill-mask"
# The tasks that are served, with examples for the warm-up. Where the text must have a mask, there is none: masks differ.
TASKS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "text-classification": ["Serve it now."],
        "sentiment-analysis": ["Serve it now."],
        "token-classification": ["Ada Lovelace was born in London."],
        "ner": ["Ada Lovelace was born in London."],
        FILL_MASK: [],
        GENERATION: ["Once upon a time"],
    }
)

LOADING = Lock()  # while transformers loads weights, what other threads of the process make has none


class TransformersModel(Model):
    """Runs the pipeline of `task` with the model `source`: an item is a text, or an object with the key "text" or, as for
    Hugging Face's own services, "inputs".

    `device` is as in Model.torch_device. `dtype` is torch's name of the type of the weights, such as bfloat16; by default the one
    that they are stored in. `options` are passed to each call of the pipeline, such as {"top_k": null} or {"max_new_tokens": 20}.
    """

    task: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def __init__(self, device: str = "auto", dtype: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        if options is not None and not isinstance(options, Mapping):
            raise SettingsError(f"options={options!r}: must be an object of arguments by name")
        self._device, self._dtype, self._options = device, dtype, dict(options or {})

    def load(self) -> None:
        """Make the pipeline; a model of the hub is downloaded once."""
        from transformers import pipeline

        log_its_lines_once()
        device = self.torch_device(self._device)
        with LOADING:
            self._pipeline = pipeline(self.task, model=self.source, device=device, dtype=self._dtype)
        if self.task == GENERATION:
            pad_left(self._pipeline.tokenizer)

    def preprocess(self, item: Any) -> Any:
        """Return the text of an item. Raises InvalidRequest if it has none."""
        text = item.get("text", item.get("inputs")) if isinstance(item, Mapping) else item
        if isinstance(item, Mapping) and item.get("parameters"):
            rule = "parameters: must be empty; the server's settings have them: --param 'options={\"top_k\": 2}'"
            raise InvalidRequest(rule)
        if not isinstance(text, str):
            hint = "; POST several to /infer/NAME/batch, as a list" if isinstance(text, list) else ""
            raise InvalidRequest(
                f'an item must be a text, or an object with the key "text" or "inputs": it is {brief(item, 60)}{hint}'
            )
        return text

    def predict(self, batch: list[str]) -> list[Any]:
        """Return the pipeline's result for each text."""
        results = self._pipeline(batch, batch_size=len(batch), **self._options)
        if self.task == FILL_MASK and len(batch) == 1:  # whose result this pipeline takes out of the list
            results = [results]
        return [plain(each) for each in results]


def pad_left(tokenizer: Any) -> None:
    """Let `tokenizer` fill up the texts of a batch to one length before they begin, for a model that goes on after their ends."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    tokenizer.padding_side = "left"


def plain(value: Any) -> Any:
    """Return `value` without numpy's types, which scores have in some pipelines."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
