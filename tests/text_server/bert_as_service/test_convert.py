"""Original checkpoints become directories that are read like every other."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_server.bert_as_service import bundles

from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.formats import Malformed, fields
from weir.text_models.texts import TokenRule
from weir.text_server.bert_as_service.convert import MAGIC, Bundle, convert, read_table


@pytest.mark.parametrize("labels", [0, 2])
def test_every_weight_is_what_it_was(labels: int, tmp_path: Path) -> None:
    weights = bundles.write_original(tmp_path / "original", labels=labels)
    target = convert(tmp_path / "original", tmp_path / "deep" / "converted")
    written = {"config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"}
    assert {path.name for path in target.iterdir()} == written
    found = open_tensors(target / "model.safetensors")
    assert set(found) == set(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value)
    checkpoint = read_checkpoint(target)
    assert (checkpoint.architecture.labels, checkpoint.architecture.has_pooler) == (labels, True)
    encode = checkpoint.tokenizer().encode
    assert encode(["The Weir"], TokenRule(64)) == encode(["the weir"], TokenRule(64))


def test_an_index_that_tensorflow_wrote(tmp_path: Path) -> None:
    """The index is from tf.train.Saver of TensorFlow 2.21; the values are put where it says that they are."""
    found, weights = bundles.variables(labels=2)
    bundles.write_settings(tmp_path)
    shutil.copyfile(Path(__file__).parent / "tensorflow-2.21.index", tmp_path / "bert_model.ckpt.index")
    bundle = Bundle(tmp_path / "bert_model.ckpt")
    assert set(bundle.variables) == set(found)
    data = bytearray(max(known.offset + known.size for known in bundle.variables.values()))
    for name, known in bundle.variables.items():
        assert known.shape == found[name].shape
        data[known.offset : known.offset + known.size] = found[name].tobytes()
    (tmp_path / "bert_model.ckpt.data-00000-of-00001").write_bytes(data)
    converted = open_tensors(convert(tmp_path, tmp_path / "converted") / "model.safetensors")
    for name, value in weights.items():
        np.testing.assert_array_equal(converted[name], value)


def test_capitals_count_if_the_vocabulary_has_any(tmp_path: Path) -> None:
    bundles.write_original(tmp_path / "original", cased=True, name="model.ckpt-343")
    for cased, lower in ((None, False), (False, True)):
        target = convert(tmp_path / "original", tmp_path / f"{cased}", cased=cased)
        assert json.loads((target / "tokenizer_config.json").read_text())["do_lower_case"] is lower


def test_the_checkpoint_is_chosen_by_name(tmp_path: Path) -> None:
    for name in ("model.ckpt-1", "model.ckpt-2"):
        bundles.write_original(tmp_path / "original", name=name)
    rule = r"no bert_model.ckpt.index; available checkpoints: model.ckpt-1, model.ckpt-2"
    with pytest.raises(SettingsError, match=rule):
        convert(tmp_path / "original", tmp_path / "converted")
    assert convert(tmp_path / "original", tmp_path / "converted", name="model.ckpt-2").is_dir()


def test_directories_that_are_no_original_bert(tmp_path: Path) -> None:
    source, data = tmp_path / "original", tmp_path / "original" / "bert_model.ckpt.data-00000-of-00001"
    found, _ = bundles.variables()

    def refused(rule: str, **changed: Any) -> None:
        if changed:
            left = {name: value for name, value in found.items() if "layer_2" not in name or "fewer" not in changed}
            bundles.write_bundle(source / "bert_model.ckpt", left | changed.get("more", {}))
            data.write_bytes(data.read_bytes()[: changed.get("size")])
        with pytest.raises(SettingsError, match=rule):
            convert(source, tmp_path / "converted")
        assert {path.name for path in tmp_path.iterdir()} <= {"original"}

    refused("has no bert_config.json")
    bundles.write_settings(source)
    refused("available checkpoints: none")
    refused("has no 'bert/encoder/layer_2/attention/self/query/kernel'", fewer=True)
    refused("data-00000-of-00001: is truncated", size=5000)
    short = {"bert/pooler/dense/bias": np.zeros(31, np.float32)}
    refused(r"'pooler.dense.bias' has the shape \[31\], config.json requires \[32\]", more=short)
    (source / "vocab.txt").unlink()
    refused("has no vocab.txt", more={})


def test_nothing_is_written_over(tmp_path: Path) -> None:
    bundles.write_original(tmp_path / "original")
    with pytest.raises(SettingsError, match="must be a new or empty directory"):
        convert(tmp_path / "original", tmp_path / "original")
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / "original", tmp_path / "empty") == tmp_path / "empty"


ENTRIES = {f"some/name/{place:03}".encode(): bytes([place]) * place for place in range(40)}


def test_all_entries_of_several_blocks() -> None:
    assert read_table(bundles.table(ENTRIES)) == ENTRIES


@pytest.mark.parametrize("message", [b"\x80", b"\x12\x05abc", b"\x0b", b"\x08" + b"\xff" * 11, b"\x0d\1"])
def test_fields_that_are_cut_off(message: bytes) -> None:
    with pytest.raises(Malformed):
        list(fields(message))


def test_a_compressed_block() -> None:
    data = bytearray(bundles.table({b"a": b"b"}))
    data[len(bundles.block({b"a": b"b"}))] = 1
    with pytest.raises(Malformed, match="compressed"):
        read_table(bytes(data))


def test_few_bytes_do_not_become_many() -> None:
    """Each entry's key is that of the one before and a byte more: a megabyte would be as many as there is no memory for."""
    entries = b"".join(bundles.varint(place) + b"\1\0k" for place in range(20_000))
    growing = entries + bytes(4) + (1).to_bytes(4, "little")
    handle = bundles.varint(0) + bundles.varint(len(growing))
    index = bundles.block({b"k": handle})
    place = len(growing) + 5
    footer = bundles.varint(0) + b"\0" + bundles.varint(place) + bundles.varint(len(index))
    whole = growing + bytes(5) + index + bytes(5) + footer.ljust(40, b"\0") + MAGIC
    with pytest.raises(Malformed, match="its entries take more than 64 MiB"):
        read_table(whole)
