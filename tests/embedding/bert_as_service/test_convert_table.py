"""Tables that are broken anywhere are refused, or read as something: never an error of another kind."""

from pathlib import Path

import numpy as np
import pytest
from tests.embedding.bert_as_service import bundles

from weir.embedding.bert_as_service.convert import MAGIC, Bundle, read_table
from weir.embedding.tokens.files import Malformed, fields
from weir.errors import SettingsError

ENTRIES = {f"some/name/{place:03}".encode(): bytes([place]) * place for place in range(40)}


def test_all_entries_of_several_blocks() -> None:
    assert read_table(bundles.table(ENTRIES)) == ENTRIES


def test_fields_of_every_kind() -> None:
    message = (
        bundles.field(1, 300)
        + bundles.field(2, b"abc")
        + bundles.varint(3 << 3 | 5)
        + b"\1\0\0\0"
        + bundles.varint(4 << 3 | 1)
        + b"\2"
        + bytes(7)
    )
    assert list(fields(message)) == [(1, 300), (2, b"abc"), (3, 1), (4, 2)]


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


def test_bytes_changed_at_random(tmp_path: Path) -> None:
    found, _ = bundles.variables()
    bundles.write_bundle(tmp_path / "model", found)
    path = tmp_path / "model.index"
    whole = path.read_bytes()
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(400):
        data = bytearray(whole[: random.integers(len(whole))] if random.random() < 0.3 else whole)
        for place in random.integers(max(len(data), 1), size=random.integers(1, 5)):
            if place < len(data):
                data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            bundle = Bundle(tmp_path / "model")
            for name in bundle.variables:
                bundle.read(name)
        except SettingsError as error:
            assert str(tmp_path) in error.message
            refused += 1
    assert refused > 200
