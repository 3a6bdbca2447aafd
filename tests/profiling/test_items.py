from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.rings import subcases

from weir.errors import SettingsError
from weir.messages import JSON, OBJECT
from weir.model import Example, Measure, Model, Tensor
from weir.profiling import Entry, Items, ProfilingSettings, RawItem, items_of, read_items


class Plain(Model):
    examples: ClassVar[list[Any]] = [Example(3, 9), {"text": "hello"}]

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Sized(Plain):
    """An item is so many rows."""

    @classmethod
    def measure(cls, item: int) -> int | None:
        return item or None


class Keyed(Plain):
    @classmethod
    def measure(cls, item: str) -> Measure:
        return Measure(key=item[0])


class Affine(Model):
    inputs = (Tensor("x", "FP32", (-1, 3)),)
    outputs = (Tensor("y", "FP32", (-1, 1)),)
    examples = ({"x": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]},)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"][:, :1]}


def test_the_models_examples_travel_as_callers_of_http_send_them() -> None:
    items = items_of(Plain)
    assert items.content_type == JSON
    assert sorted(items.batch(2)) == [b"3", b'{"text":"hello"}']


@subcases("item", [(1, 2), b"bytes", np.zeros(2), [np.zeros(2)], {1, 2}, object()])
def test_what_json_cannot_carry_unchanged_travels_as_a_value(item: Any) -> None:
    items = items_of(Plain, [item])
    assert items.content_type == OBJECT
    assert items.batch(1)[0] is item


def test_each_item_is_drawn_as_often_as_any_other() -> None:
    items = Items([Entry(value) for value in range(7)], seed=3)
    drawn = Counter(payload for _ in range(100) for payload in items.batch(7))
    assert set(drawn.values()) == {100}
    assert len(items) == 7


def test_the_seed_decides_the_order() -> None:
    def drawn(seed: int) -> list[Any]:
        return Items([Entry(value) for value in range(20)], seed=seed).batch(20)

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_batch_has_exactly_the_rows_requested() -> None:
    items = items_of(Sized, [2, 3, 7])
    assert [rows for rows in range(1, 10) if items.can_fill(rows)] == [2, 3, 4, 5, 6, 7, 8, 9]
    for rows in (2, 3, 7, 8, 61):
        assert sum(map(int, items.batch(rows))) == rows


def test_only_items_of_one_key_share_a_batch() -> None:
    items = items_of(Keyed, ["a1", "a2", "b1"])
    batches = [items.batch(4) for _ in range(50)]
    assert {payload[1:2] for batch in batches for payload in batch} == {b"a", b"b"}
    assert all(len({payload[1] for payload in batch}) == 1 for batch in batches)


def test_each_row_of_a_tensor_model_is_an_entry() -> None:
    items = items_of(Affine)
    assert items.content_type == OBJECT
    assert len(items) == 2
    rows = [payload["x"] for payload in items.batch(4)]
    assert all(row.shape == (1, 3) and row.dtype == np.float32 for row in rows)


def test_without_anything_to_measure_with_it_says_how_to_give_it() -> None:
    class Bare(Model):
        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    with pytest.raises(SettingsError, match=r"Bare: there is nothing to measure it with: .*examples.*--items"):
        items_of(Bare)
    with pytest.raises(SettingsError, match="items: none given to measure Bare with"):
        items_of(Bare, [])


def test_items_that_the_model_cannot_measure_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"Keyed.measure cannot measure the item 3"):
        items_of(Keyed, [3])
    with pytest.raises(SettingsError, match="tensor 'z': not one of 'x'"):
        items_of(Affine, [{"z": [[1.0]]}])


class Picture(Plain):
    content_types: ClassVar[list[str]] = ["Image/X"]

    def decode(self, body: bytes, content_type: str) -> Any:
        return body


class Copied(Picture):
    def encode(self, value: Any, content_type: str) -> bytes:
        return bytes(value)


def test_bodies_travel_in_the_models_own_content_type() -> None:
    items = items_of(Picture, [RawItem(b"abc")])
    assert (items.content_type, items.accept, items.batch(2)) == ("image/x", JSON, [b"abc", b"abc"])
    assert items_of(Copied, [RawItem(b"abc")]).accept == "image/x"
    with pytest.raises(SettingsError, match="Plain reads no content types of its own"):
        items_of(Plain, [RawItem(b"abc")])


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@subcases(
    ("name", "text", "expected"),
    [
        ("items.json", '[1,\n "two", [3]]', [1, "two", [3]]),  # a JSON list is its elements
        ("one.json", '{"text": "hello"}', [{"text": "hello"}]),
        ("items.jsonl", "[1, 2]\n\n[3]\n", [[1, 2], [3]]),  # lines are items, also when they are lists
        ("one.jsonl", "[1, 2]", [[1, 2]]),
        ("items.txt", '"a"\n"b"\n', ["a", "b"]),
    ],
)
def test_a_file_of_json_or_lines_has_items(tmp_path: Path, name: str, text: str, expected: list[Any]) -> None:
    assert read_items(written(tmp_path, name, text)) == expected


def test_arrays_are_named_tensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "items.npz", x=np.arange(6.0).reshape(3, 2))
    (arrays,) = read_items(tmp_path / "items.npz")
    assert arrays["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("items.jsonl", "1\nnot json\n", "line 2: "),
        ("items.jsonl", "\n", "has no items"),
        ("items.json", "[]", "has no items"),
        ("items.npz", "no arrays", "must be arrays saved by numpy.savez"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        read_items(written(tmp_path, name, text))
    assert name in raised.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("items.jsonl", "items.npz"):
        with pytest.raises(SettingsError, match="cannot be read"):
            read_items(tmp_path / name)


def test_the_files_of_a_folder_are_bodies(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode())
    assert read_items(tmp_path) == [RawItem(b"a"), RawItem(b"b")]
    with pytest.raises(SettingsError, match="has no items"):
        read_items(tmp_path / "folder")


@subcases(
    ("setting", "message"),
    [
        ({"sizes": [4, 0]}, "sizes=0: must be whole numbers of rows, 1 or more"),
        ({"seconds": 0.0}, r"seconds=0.0: must be greater than 0"),
        ({"confidence": -1.0}, r"confidence=-1.0: must be a share, greater than 0 and less than 1"),
        ({"confidence": 2.0}, r"confidence=2.0: must be a share, greater than 0 and less than 1"),
        ({"power": 0.0}, r"power=0.0: must be greater than 0"),
    ],
)
def test_a_setting_that_cannot_be_says_which(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ProfilingSettings(**setting)
