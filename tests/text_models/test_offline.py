"""`weir embed search`: the texts of a file or the pictures of a directory, and those that are nearest to a query."""

from pathlib import Path

import numpy as np
import pytest
from tests.images.pictures import drawn, written
from tests.text_models import tiny, tiny_towers
from tests.text_models.opening import params_of

from weir.errors import SettingsError
from weir.text_models.model import TextEncoder
from weir.text_models.offline import encode, read_pictures, read_texts, search


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


def test_the_pictures_nearest_to_a_text_are_found_below_a_directory(tmp_path: Path) -> None:
    directory = tiny_towers.model(tmp_path / "model")
    model = TextEncoder(**params_of(directory, tmp_path / "cache"))
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for number, name in enumerate(["a.PNG", "more/b.png", "c.png"]):
        (tmp_path / "photos" / name).write_bytes(written(drawn(30, 20, number)))
    (tmp_path / "photos" / "notes.txt").write_text("no picture")

    paths = read_pictures(tmp_path / "photos")
    assert [path.name for path in paths] == ["a.PNG", "c.png", "b.png"]
    hits = search(model, paths, "a dog in the snow", 3)
    vectors = encode(model, [*paths, "a dog in the snow"])  # of length 1
    expected = vectors[:3] @ vectors[3]
    assert (
        [paths.index(Path(hit.text)) for hit in hits]
        == [hit.place - 1 for hit in hits]
        == np.argsort(-expected).tolist()
    )
    assert [hit.similarity for hit in hits] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)

    for content, rule in ((b"no picture", "is no image in a format that is read"), (None, "cannot be read")):
        paths[0].unlink()
        if content is not None:
            paths[0].write_bytes(content)
        with pytest.raises(SettingsError, match=f"photos/a.PNG: {rule}"):
            encode(model, paths)


def test_a_directory_without_pictures_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"has no pictures \(\.png, "):
        read_pictures(tmp_path)
