"""ONNX files in a model's directory: which one is served, and what it makes. They serve families that are not computed from their weights here.

A repository has `onnx/model.onnx`, or the file at its root, and variants of it in other numbers, whose names follow transformers.js or sentence-transformers.
"""

import mmap
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.text_models.checkpoint.configuration import read_architecture
from weir.text_models.checkpoint.families import MODEL2VEC
from weir.text_models.checkpoint.weights import StoredNames
from weir.text_models.formats import DTYPES, ENDING, MODEL, JsonDocument, Malformed, NotComputed, fields, read_document

FOLDER = "onnx"
RUNTIME = "onnx-file"  # computes such a file
# Of the files for a kind of CPU, the one that this machine computes well comes first.
_BY_CPU = (
    ("avx512_vnni", "model_qint8_avx512_vnni.onnx"),
    ("avx512f", "model_qint8_avx512.onnx"),
    ("avx2", "model_quint8_avx2.onnx"),
    ("aarch64", "model_qint8_arm64.onnx"),
)
# What transformers.js, optimum and sentence-transformers call the vectors of tokens, and of texts.
OF_TOKENS = ("last_hidden_state", "token_embeddings")
LOGITS = "logits"


def file_names(dtype: str | None) -> Sequence[str]:
    """Return the names of the files of a variant, None for the usual one; the first that is there is served."""
    if dtype is None:
        return (MODEL,)
    if dtype not in DTYPES:
        return (dtype,)
    by_cpu = [name for feature, name in _BY_CPU if feature in _features()] if dtype == "int8" else []
    return (*DTYPES[dtype], *by_cpu)


def _features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return {platform.machine(), *flags}


def wanted_names(runtime: str, dtype: str | None, config: Path | None) -> Sequence[str]:
    """Return the names of the ONNX files of which one is to be served; none if the weights are.

    A file is served by the runtime "onnx-file", or with a `dtype`, or by the onnx runtime if the network that the file `config` describes is not computed here.
    """
    if runtime == RUNTIME or (runtime == "onnx" and (dtype is not None or not (config is None or is_computed(config)))):
        return file_names(dtype)
    return ()


def is_computed(config: Path) -> bool:
    """Return whether the onnx runtime computes the network that a config.json describes from its weights. A broken file counts as one that it does."""
    try:
        document = read_document(config)
        if document.text("model_type") == MODEL2VEC:
            return True
    except SettingsError:
        return True
    try:
        read_architecture(document, has_pooler=False, has_classifier=False)
    except NotComputed:
        return False
    except SettingsError:
        pass
    return True


def find_file(directory: Path, names: Sequence[str]) -> Path | None:
    """Return the first of the files `names` that stands in the folder onnx of `directory`, or in `directory` itself; None if there is none."""
    found = (folder / name for name in names for folder in (directory / FOLDER, directory))
    return next((path for path in found if path.is_file()), None)


class OnnxFile(NamedTuple):
    """An ONNX file, and the sizes of its outputs by name: the axes, None for one that varies."""

    path: Path
    outputs: Mapping[str, Sequence[int | None]]

    def output(self, classifies: bool) -> str:
        """Return the name of the output that is served: the vectors of tokens, else that of texts, or with `classifies` the numbers of the labels.

        Raises SettingsError naming the outputs that there are.
        """
        if classifies and LOGITS in self.outputs:
            return LOGITS
        names = [name for name in self.outputs if name != LOGITS and not name.startswith("present")]
        ranked = [name for axes in (3, 2) for name in (*OF_TOKENS, *names) if len(self.outputs.get(name, ())) == axes]
        if not ranked:
            raise SettingsError(
                f"{self.path}: has the outputs {', '.join(self.outputs) or 'none'}, but none with vectors"
            )
        return ranked[0]

    @property
    def paths(self) -> list[Path]:
        """The file, and those with weights next to it."""
        externals = (f"{self.path}_data", f"{self.path}.data", f"{str(self.path).removesuffix(ENDING)}_data")
        return [self.path, *(Path(each) for each in externals if Path(each).is_file())]


class OnnxStore(NamedTuple):
    """Stands for the weights of a checkpoint that is served from an ONNX file; see weights.Store."""

    paths: list[Path]
    files: dict[str, Any]
    stored: StoredNames


def store_of(file: OnnxFile) -> OnnxStore:
    """Return the store of an ONNX file: no weight of it can be read by name."""
    return OnnxStore(file.paths, {}, StoredNames((), str(file.path)))


def read_onnx_file(path: Path) -> OnnxFile:
    """Return what an ONNX file says of its outputs. Its weights are not read. Raises SettingsError if it is broken."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                return OnnxFile(path, _outputs(view))
            finally:
                view.release()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (Malformed, UnicodeDecodeError, ValueError) as error:
        raise SettingsError(f"{path}: is damaged, or is not an ONNX file: {error}") from None


# The numbers of the fields in onnx.proto that are read.
_GRAPH, _OUTPUT, _NAME, _TYPE, _TENSOR, _SHAPE, _DIM, _DIM_VALUE = 7, 12, 1, 2, 1, 2, 1, 1


def _outputs(model: Any) -> dict[str, list[int | None]]:
    graph = _message(model, _GRAPH)
    if graph is None:
        raise Malformed("it has no graph")
    found = {}
    for number, value in fields(graph):
        if number == _OUTPUT and not isinstance(value, int):
            name, shape = _message(value, _NAME), _nested(value, _TYPE, _TENSOR, _SHAPE)
            dims = [] if shape is None else [each for field, each in fields(shape) if field == _DIM]
            found[bytes(name or b"").decode()] = [_size(dim) for dim in dims]
    return found


def _size(dim: Any) -> int | None:
    return next(
        (value for number, value in fields(dim) if number == _DIM_VALUE and isinstance(value, int) and value), None
    )


def _nested(message: Any, *numbers: int) -> Any:
    for number in numbers:
        message = None if message is None else _message(message, number)
    return message


def _message(message: Any, wanted: int) -> Any:
    """Return the first field with the number `wanted` that is a message, a text or bytes; None if there is none."""
    return next((value for number, value in fields(message) if number == wanted and not isinstance(value, int)), None)


def classifies_texts(config: JsonDocument) -> bool:
    """Return whether config.json says that the model labels texts."""
    named = config.values.get("architectures")
    return isinstance(named, list) and any(str(each).endswith("ForSequenceClassification") for each in named)
