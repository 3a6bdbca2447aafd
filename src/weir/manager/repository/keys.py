"""The keys of a model's file, beside the settings of models, which may all stand there under their own names."""

from collections.abc import Mapping
from types import MappingProxyType

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "name": "name of the model; must be the folder's",
        "platform": "`python`, `onnx`, `ensemble`, or one that a package brings (entry point `weir.platforms`); without it, what the files are",
        "target": "of platform python: `FILE.py:Class` in the version's folder, or `module:Class`; without it, the one model of `file`",
        "file": "file in the version's folder; `model.py`, or the only `.onnx` file",
        "versions": 'versions to serve: "all" (the default), a list such as ["1", "3"], or how many of the highest',
        "default": "version that is meant where none is named; the highest",
        "steps": "of platform ensemble: tables with `model`, `version`, `inputs` and `outputs`, or with `branch`, or with `switch`",
        "params": "table of arguments for the model's constructor",
        "route": "path of the model's own, or a list of them",
        "inputs": "tables with `name`, `datatype` and `shape` of each input tensor; must agree with what the model itself says",
        "outputs": "the same of each output tensor",
        "batch_dimension": "whether requests have the batch as first dimension: `required`, `optional` (one row may come without) or `none` (each runs alone, as it is); without it, what the model itself says, and `max_batch_size` (0: none)",
        "examples": "list of items, or of tables of arrays, to warm up with and to check health by",
        "warmup_sizes": "batch sizes to warm up at",
    }
)

# Keys of Triton's and the AMD Inference Server's files that have no meaning here, and what to do instead. What says nothing, as it is the default, is passed over.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "models": "ensembles of AMD's form are not read",
        "ensemble_scheduling": "ensembles of Triton's form are not read",
        "sequence_batching": "sequences of requests are not kept together",
        "model_warmup": "say `examples` and `warmup_sizes` in config.toml",
        "model_operations": "libraries of operations are not loaded",
        "model_repository_agents": "there are no agents",
        "response_cache": "answers are not cached",
        "cc_model_filenames": "files are not chosen by compute capability",
        "runtime": "backends are chosen by `platform`",
        "batch_input": "tensors that say something of the whole batch are not made",
        "batch_output": "tensors that say something of the whole batch are not divided",
    }
)

# Keys that change no answer, only how fast it comes or what is shown beside it: they are passed over with a warning.
WARNED: Mapping[str, str] = MappingProxyType(
    {
        "optimization": "optimisation is the platform's own",
        "metric_tags": "metrics have the labels that they have",
        "model_metrics": "metrics are those that there are",
        "model_control_mode": "the server's own flags say what is loaded",
        "default_priority_level": "requests say their priority",
    }
)
