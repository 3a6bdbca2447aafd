from pathlib import Path

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.profiling.items import RawItem, read_items


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_json_list_is_its_elements(tmp_path: Path) -> None:
    assert read_items(written(tmp_path, "items.json", '[1,\n "two", [3]]')) == [1, "two", [3]]
    assert read_items(written(tmp_path, "one.json", '{"text": "hello"}')) == [{"text": "hello"}]


def test_lines_are_items_also_when_they_are_lists(tmp_path: Path) -> None:
    assert read_items(written(tmp_path, "items.jsonl", "[1, 2]\n\n[3]\n")) == [[1, 2], [3]]
    assert read_items(written(tmp_path, "one.jsonl", "[1, 2]")) == [[1, 2]]
    assert read_items(written(tmp_path, "items.txt", '"a"\n"b"\n')) == ["a", "b"]


def test_arrays_are_named_tensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "items.npz", x=np.arange(6.0).reshape(3, 2))
    (arrays,) = read_items(tmp_path / "items.npz")
    assert arrays["x"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("items.jsonl", "1\nnot json\n", "line 2: "),
        ("items.jsonl", "\n", "there are none in it"),
        ("items.json", "[]", "there are none in it"),
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


def test_arrays_without_any_are_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz")
    with pytest.raises(SettingsError, match="there are none in it"):
        read_items(tmp_path / "none.npz")


def test_the_files_of_a_folder_are_bodies(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode())
    assert read_items(tmp_path) == [RawItem(b"a"), RawItem(b"b")]
    with pytest.raises(SettingsError, match="there are none in it"):
        read_items(tmp_path / "folder")
