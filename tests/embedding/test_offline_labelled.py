"""Files of texts."""

from pathlib import Path

import pytest

from weir.embedding.offline import Labelled, read_labelled
from weir.errors import SettingsError

FOUND = Labelled(["one, two", "three"], ["a", "b"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", '{"text": "one, two", "label": "a"}\n\n{"label": "b", "text": "three"}\n'),
        ("x.csv", 'label,text\na,"one, two"\nb,three\n'),
        ("x.tsv", "text\tlabel\none, two\ta\nthree\tb\n"),
        ("x.txt", "a\tone, two\nb\tthree\n"),
    ],
)
def test_every_form_says_the_same(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_labelled(tmp_path / name) == FOUND
    assert read_labelled(tmp_path / name, labels=False) == FOUND


@pytest.mark.parametrize(("name", "content"), [("x.txt", "one\ntwo\n"), ("x.jsonl", '"one"\n{"text": "two"}')])
def test_labels_may_be_missing_where_none_are_wanted(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_labelled(tmp_path / name, labels=False) == Labelled(["one", "two"], ["", ""])
    with pytest.raises(SettingsError, match="line 1: has no label"):
        read_labelled(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"{", "line 1: must be JSON"),
        ("x.jsonl", b"[1]", "line 1: must be an object"),
        ("x.csv", b"a,b\n1,2\n", "its first line must name the columns"),
        ("x.txt", b"a\t \n", "line 1: has no text"),
        ("x.txt", b"", "has no texts"),
        ("x.txt", b"\xff", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_labelled(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_labelled(tmp_path / "nothing")
