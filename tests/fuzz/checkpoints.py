"""What is fuzzed of a model's directory: each target takes the bytes of one file, and raises if a promise is broken.

The promise: a file that is broken ends in a SettingsError, and nothing is larger than a file of its size can be.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from weir.errors import InvalidRequest, SettingsError
from weir.text_models.checkpoint.configuration import read_architecture, read_family
from weir.text_models.checkpoint.reading import read_layout
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.formats import read_document
from weir.text_models.texts import TokenRule
from weir.text_models.tokenizer import Tokenizer
from weir.text_server.bert_as_service.convert import Bundle

TEXTS = ("First do it, then do it right.", "\u00e9\u4e00 \U0001f600")


def safetensors(data: bytes) -> None:
    """A file of weights."""
    with _file("model.safetensors", data) as path:
        tensors = open_tensors(path)
        for name in tensors:
            assert tensors[name].size <= len(data)


def tensorflow_index(data: bytes) -> None:
    """The index of a TensorFlow checkpoint, whose values are as many bytes."""
    with _file("bert_model.ckpt.index", data) as path:
        path.with_name("bert_model.ckpt.data-00000-of-00001").write_bytes(bytes(len(data)))
        bundle = Bundle(path.with_name("bert_model.ckpt"))
        for name in bundle.variables:
            with contextlib.suppress(SettingsError):
                assert bundle.read(name).nbytes <= len(data)


def config(data: bytes) -> None:
    """A config.json."""
    with _file("config.json", data) as path:
        found = read_document(path)
        read_family(found)
        read_architecture(found, has_pooler=True, has_classifier=True)


def modules(data: bytes) -> None:
    """A modules.json, with all that it may name; the first byte says which of the files the rest is."""
    names = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"))
    listed = ",".join(f'{{"path":"{path}","type":"x.{kind}"}}' for path, kind in kinds)
    with _file("modules.json", f"[{listed}]".encode()) as path:
        (path.parent / "1_Pooling").mkdir()
        (path.parent / "1_Pooling" / "config.json").write_text("{}")
        (path.parent / names[int.from_bytes(data[:1], "little") % len(names)]).write_bytes(data[1:])
        read_layout(path.parent)


def tokenizer_json(data: bytes) -> None:
    """A tokenizer.json."""
    with _file("tokenizer.json", data) as path:
        _read_texts(path.parent)


def vocabulary(data: bytes) -> None:
    """A vocab.txt."""
    with _file("vocab.txt", data) as path:
        (path.parent / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        _read_texts(path.parent)


CHECKPOINTS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (safetensors, tensorflow_index, config, modules, tokenizer_json, vocabulary)
}


def _read_texts(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    for found in tokenizer.encode(TEXTS, TokenRule(16)):
        assert isinstance(found, InvalidRequest) or len(found.ids) <= 4 * 16


@contextlib.contextmanager
def _file(name: str, data: bytes) -> Iterator[Path]:
    """A directory with this file, and nothing left of it; what it is refused for is what was promised."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SettingsError):
        path = Path(folder) / name
        path.write_bytes(data)
        yield path
