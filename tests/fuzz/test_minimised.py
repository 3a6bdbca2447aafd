from pathlib import Path

from tests.fuzz.minimised import minimise, turns
from tests.fuzz.targets import elements


def test_what_takes_the_same_way_is_the_same() -> None:
    whole, cut = b"\1\1\0\0\0a", b"\1\2\0\0\0a"
    assert turns(elements, whole) == turns(elements, b"\1\1\0\0\0b")
    assert turns(elements, whole) != turns(elements, cut)


def test_the_smallest_that_add_something_are_left(tmp_path: Path) -> None:
    said = {
        "a": b"\1\2\0\0\0ab",
        "b": b"\1\1\0\0\0a",
        "c": b"\1\2\0\0\0a",
        "seed-0": b"\1\1\0\0\0abc",
        "found-crash-1": b"\5",
    }
    for name, data in said.items():
        (tmp_path / name).write_bytes(data)
    assert minimise(elements, tmp_path) == (5, 4)
    assert {file.name for file in tmp_path.iterdir()} == {"b", "c", "seed-0", "found-crash-1"}
