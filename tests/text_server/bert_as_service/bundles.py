"""Writes what the original BERT's checkpoints consist of, to read it back: tables, protocol buffers, variables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.text_models import tiny, tiny_tokens


def variables(labels: int = 0, layers: int = 3) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.float32]]]:
    """Return a tiny BERT's variables by TensorFlow's names, and its weights by Hugging Face's."""
    config = tiny.configuration("bert", layers, labels, tiny_tokens.vocabulary_size())
    weights = tiny.weights("bert", config, labels, pooler=True, seed=3)
    found: dict[str, NDArray[Any]] = {}
    for name, value in weights.items():
        if name.startswith("classifier"):
            found["output_" + ("weights" if value.ndim == 2 else "bias")] = value
            continue
        path = (
            name.removeprefix("bert.")
            .replace(".layer.", ".layer_")
            .replace(".", "/")
            .replace("_embeddings/weight", "_embeddings")
        )
        path = path.replace("LayerNorm/weight", "LayerNorm/gamma").replace("LayerNorm/bias", "LayerNorm/beta")
        kernel = path.endswith("/weight")
        found["bert/" + path.replace("/weight", "/kernel")] = value.T if kernel else value
    found["global_step"] = np.array(5, np.int64)
    found["bert/pooler/dense/kernel/adam_m"] = np.zeros((32, 32), np.float32)
    return found, weights


def write_original(
    directory: Path, *, labels: int = 0, name: str = "bert_model.ckpt", cased: bool = False
) -> dict[str, NDArray[np.float32]]:
    """Write a directory as the original BERT came in, and return its weights by Hugging Face's names."""
    found, weights = variables(labels)
    write_settings(directory, cased=cased)
    write_bundle(directory / name, found)
    return weights


def write_settings(directory: Path, *, cased: bool = False) -> None:
    """Write bert_config.json and vocab.txt."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokens.write_vocabulary(directory)
    if cased:
        lines = (directory / "vocab.txt").read_text().split("\n")
        (directory / "vocab.txt").write_text("\n".join([*lines[:-2], "The", ""]))
    whole = tiny.configuration("bert", 3, 0, tiny_tokens.vocabulary_size())
    left_out = ("model_type", "architectures", "layer_norm_eps", "pad_token_id")  # these came later
    config = {key: value for key, value in whole.items() if key not in left_out}
    (directory / "bert_config.json").write_text(json.dumps(config))


def write_bundle(prefix: Path, found: dict[str, NDArray[Any]]) -> None:
    """Write an index and a data file."""
    kinds = {"float32": 1, "int64": 9, "float16": 19}
    data, entries = b"", {b"": field(1, 1)}
    for name in sorted(found):
        value = np.ascontiguousarray(found[name]) if found[name].ndim else found[name]
        shape = b"".join(field(2, field(1, size)) for size in value.shape)
        entry = field(1, kinds[value.dtype.name]) + field(2, shape) + field(4, len(data)) + field(5, value.nbytes)
        entries[name.encode()] = entry + varint(6 << 3 | 5) + bytes(4)
        data += value.tobytes()
    prefix.with_name(prefix.name + ".index").write_bytes(table(entries))
    prefix.with_name(prefix.name + ".data-00000-of-00001").write_bytes(data)


def table(entries: dict[bytes, bytes], per_block: int = 7) -> bytes:
    """Return the file of a table, with several blocks."""
    data, index = b"", {}
    keys = sorted(entries)
    for start in range(0, len(keys), per_block):
        part = keys[start : start + per_block]
        body = block({key: entries[key] for key in part})
        index[part[-1]] = varint(len(data)) + varint(len(body))
        data += body + bytes(5)
    handles = b""
    for content in ({}, index):
        body = block(content)
        handles += varint(len(data)) + varint(len(body))
        data += body + bytes(5)
    return data + handles.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def block(entries: dict[bytes, bytes]) -> bytes:
    """Return a block whose keys share what they can with the one before."""
    body, before = b"", b""
    for key, value in entries.items():
        shared = next(
            (place for place, (a, b) in enumerate(zip(before, key, strict=False)) if a != b), min(len(before), len(key))
        )
        body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    return body + bytes(4) + (1).to_bytes(4, "little")


def field(number: int, value: int | bytes) -> bytes:
    """Return a field of a protocol buffer; zeros are left out, as they are there."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value) if value else b""


def varint(number: int) -> bytes:
    """Return a number in groups of seven bits."""
    groups = b""
    while number > 127:
        groups += bytes([number & 127 | 128])
        number >>= 7
    return groups + bytes([number])
