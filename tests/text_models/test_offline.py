"""`weir embed search`: the texts of a file, and those that are nearest to a query."""

from pathlib import Path

import pytest
from tests.text_models import tiny
from tests.text_models.opening import params_of

from weir.errors import SettingsError
from weir.text_models.model import TextEncoder
from weir.text_models.offline import encode, read_texts, search


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", '{"text": "one, two", "label": "a"}\n\n"three"\n'),
        ("x.csv", 'label,text\na,"one, two"\nb,three\n'),
        ("x.tsv", "text\tlabel\none, two\ta\nthree\tb\n"),
        ("x.txt", "a\tone, two\nthree\n"),
    ],
)
def test_every_form_says_the_same(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_texts(tmp_path / name) == ["one, two", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"{", "line 1: must be JSON"),
        ("x.jsonl", b"[1]", "line 1: must be an object"),
        ("x.csv", b"a,b\n1,2\n", "its first line must name the columns"),
        ("x.txt", b"a\t \n", "line 1: has no text"),
        ("x.txt", b"", "has no texts"),
        ("x.txt", b"\xff", "cannot be read"),
        ("none", None, "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_texts(tmp_path / name)


TEXTS = ["first do it", "then do it right", "then do it better", "the weather is lovely", "it is sunny"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    directory = tiny.model(tmp_path_factory.mktemp("model"), "bert", layers=3)
    return TextEncoder(**params_of(directory, tmp_path_factory.mktemp("cache")))


def test_progress_is_reported(model: TextEncoder) -> None:
    told: list[tuple[int, int]] = []
    encode(model, TEXTS * 7, lambda done, of: told.append((done, of)))
    assert told == [(32, 35), (35, 35)]


def test_a_text_that_cannot_be_read_is_named(model: TextEncoder) -> None:
    with pytest.raises(SettingsError, match="text 2: "):
        encode(model, ["one", "\ud800"])


def test_the_nearest_to_a_text_is_that_text(model: TextEncoder) -> None:
    first, second = search(model, TEXTS, TEXTS[2], 2)
    assert (first.place, first.text) == (3, TEXTS[2]) and first.similarity == pytest.approx(1.0, abs=1e-5)
    assert second.similarity < first.similarity
