"""Converting BERT's original TensorFlow checkpoints to a directory that everything else reads."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weir.embedding.checkpoint.bundle import Bundle
from weir.embedding.checkpoint.config import JsonDocument, read_document
from weir.embedding.checkpoint.reading import read_checkpoint
from weir.embedding.checkpoint.weights import WEIGHTS, names_of
from weir.embedding.tokens.files import has_capitals
from weir.errors import SettingsError

USUAL = "bert_model.ckpt"
HEAD = {"classifier.weight": "output_weights", "classifier.bias": "output_bias"}  # of the original run_classifier.py


def convert(source: Path, target: Path, *, name: str | None = None, cased: bool | None = None) -> Path:
    """Convert a checkpoint of the original BERT and return `target`, a new directory in Hugging Face's layout.

    `source` holds bert_config.json, vocab.txt and a checkpoint: `name`, or bert_model.ckpt, or the only one that is there. `cased` says whether
    capitals count (None: they do if the vocabulary has any). A classifier that was trained on top is taken along. What the optimiser
    noted is left out. Nothing is left in `target` unless all went well.

    Raises SettingsError naming the file and the rule.
    """
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target}: must be a new or empty directory")
    config = read_document(_config(source))
    vocabulary = source / "vocab.txt"
    if not vocabulary.is_file():
        raise SettingsError(f"{source}: has no vocab.txt")
    bundle = Bundle(source / _name(source, name))
    names = _names(bundle, config.integer("num_hidden_layers"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir()
        _write(made / WEIGHTS, bundle, names)
        _settings(made, config, bundle, vocabulary, cased)
        read_checkpoint(made).tokenizer()  # what is wrong shows here
        if target.exists():
            target.rmdir()
        made.rename(target)
    return target


def _config(source: Path) -> Path:
    for name in ("bert_config.json", "config.json"):
        if (source / name).is_file():
            return source / name
    raise SettingsError(f"{source}: has no bert_config.json: must be a directory with an original BERT")


def _name(source: Path, name: str | None) -> str:
    found = sorted(path.name.removesuffix(".index") for path in source.glob("*.index"))
    wanted = name if name is not None else USUAL if USUAL in found or len(found) != 1 else found[0]
    if wanted not in found:
        raise SettingsError(f"{source}: has no {wanted}.index; the checkpoints there: {', '.join(found) or 'none'}")
    return wanted


def _names(bundle: Bundle, layers: int) -> dict[str, str]:
    """Return the variable for each weight, by the weight's name in the new file."""
    inner = names_of("bert", layers) | {"pooler.weight": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
    names = {plain: _variable(plain) for plain in inner.values()}
    if all(variable in bundle.variables for variable in HEAD.values()):
        names = {f"bert.{plain}": variable for plain, variable in names.items()} | HEAD
    for variable in names.values():
        if variable not in bundle.variables:
            raise SettingsError(f"{bundle.index}: has no {variable!r}: must be a checkpoint of the original BERT")
    return names


def _variable(name: str) -> str:
    """Return what TensorFlow calls a weight."""
    path = re.sub(r"\.layer\.(\d+)\.", r".layer_\1.", name).replace(".", "/")
    path = re.sub(r"_embeddings/weight$", "_embeddings", path)
    path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
    return "bert/" + re.sub(r"/weight$", "/kernel", path)


def _array(bundle: Bundle, variable: str) -> NDArray[Any]:
    value = bundle.read(variable)
    # TensorFlow multiplies by kernels from the right: their inputs come first.
    return value.T if variable.endswith("/kernel") else value


def _write(path: Path, bundle: Bundle, names: dict[str, str]) -> None:
    """Write a safetensors file one weight after the other, so that no more than one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, variable in names.items():
        value = _array(bundle, variable)
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [place, place + 4 * value.size]}
        place += 4 * value.size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for variable in names.values():
            file.write(np.ascontiguousarray(_array(bundle, variable), dtype="<f4").data)


def _settings(made: Path, config: JsonDocument, bundle: Bundle, vocabulary: Path, cased: bool | None) -> None:
    """Write the configuration of model and tokenizer."""
    shutil.copyfile(vocabulary, made / "vocab.txt")
    if cased is None:
        cased = has_capitals(vocabulary.read_text(encoding="utf-8", errors="replace").split("\n"))
    kind = "BertModel"
    labels: dict[str, Any] = {}
    if HEAD["classifier.bias"] in bundle.variables:
        kind = "BertForSequenceClassification"
        count = bundle.read(HEAD["classifier.bias"]).size
        labels = {"id2label": {str(label): f"LABEL_{label}" for label in range(count)}}
    whole = (
        config.values
        | {"model_type": "bert", "architectures": [kind], "layer_norm_eps": 1e-12, "pad_token_id": 0}
        | labels
    )
    text = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not cased,
        "model_max_length": config.integer("max_position_embeddings"),
    }
    for name, value in (("config.json", whole), ("tokenizer_config.json", text)):
        (made / name).write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
