"""The computations of `weir embed search`, in the command's own process: it finds the texts of a file, or the pictures in a directory, that are nearest to
a query."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError, reason_of
from weir.images import Picture
from weir.text_models.model import TextEncoder
from weir.text_models.packing import unit_vectors

Progress = Callable[[int, int], None]  # called with the number of texts that are done, and of all texts

MAX_FILE_BYTES = 1 << 28  # of a file of texts
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")  # how the names of their files end
_GROUP = 32  # texts between two steps of the progress


def _quiet(done: int, of: int) -> None:
    """Show nothing."""


def encode(model: TextEncoder, texts: Sequence[str | Path], progress: Progress = _quiet) -> NDArray[np.float32]:
    """Return the vectors of `texts` and of the pictures at paths among them, [texts, dimensions], by `model`, which is loaded for it.

    Raises SettingsError if the model cannot be loaded, or naming an invalid text or picture.
    """
    model.load_shared()
    model.load()
    vectors: list[Any] = []
    for start in range(0, len(texts), _GROUP):
        group = texts[start : start + _GROUP]
        tokenized = model.preprocess_batch([_picture(each) if isinstance(each, Path) else each for each in group])
        for index, (text, each) in enumerate(zip(group, tokenized, strict=True), start):
            if isinstance(each, Exception):
                raise SettingsError(f"{text if isinstance(text, Path) else f'text {index + 1}'}: {each}")
        vectors += model.predict(tokenized)
        progress(len(vectors), len(texts))
    return np.stack(vectors)


def _picture(path: Path) -> Picture:
    try:
        return Picture(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error


class SearchHit(NamedTuple):
    """A text that was found, or the path of a picture: its place among all, from 1, and the cosine of its vector and that of the query."""

    place: int
    text: str
    similarity: float


def search(
    model: TextEncoder, texts: Sequence[str | Path], query: str, top: int, progress: Progress = _quiet
) -> list[SearchHit]:
    """Return the `top` texts with the greatest cosine to `query`, in that order. Raises SettingsError as `encode` does."""
    vectors = unit_vectors(encode(model, [*texts, query], progress))
    similarities = vectors[:-1] @ vectors[-1]
    nearest = np.argsort(-similarities, kind="stable")[:top]
    return [SearchHit(int(index) + 1, str(texts[index]), float(similarities[index])) for index in nearest]


def read_pictures(directory: Path) -> list[Path]:
    """Return the paths of all pictures below a directory, by their names. Raises SettingsError if there is none."""
    found = sorted(path for path in directory.rglob("*") if path.suffix.lower() in PICTURES)
    if not found:
        raise SettingsError(f"{directory}: has no pictures ({', '.join(PICTURES)})")
    return found


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file. The format depends on the suffix; empty lines are skipped.

    - .jsonl, .ndjson: each line is an object with `text`, or a string;
    - .csv, .tsv: the first line names the columns, among them text;
    - others: each line is a text, or a label, a tab and a text.

    Raises SettingsError naming the file, the line and the rule.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB")
        content = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {reason_of(error)}") from error
    parse = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table}.get(path.suffix, _lines)
    found: list[str] = []
    for number, text in parse(path, content):
        if not text.strip():
            raise SettingsError(f"{path}, line {number}: has no text")
        found.append(text)
    if not found:
        raise SettingsError(f"{path}: has no texts")
    return found


def _json_lines(path: Path, content: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise SettingsError(f"{path}, line {number}: must be JSON: {error}") from error
            table = {"text": value} if isinstance(value, str) else value
            if not (isinstance(table, dict) and isinstance(table.get("text"), str)):
                raise SettingsError(f'{path}, line {number}: must be an object with "text", or a text')
            yield number, table["text"]


def _table(path: Path, content: str) -> Iterator[tuple[int, str]]:
    rows = csv.DictReader(content.splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ",")
    if "text" not in (rows.fieldnames or ()):
        raise SettingsError(f"{path}: its first line must name the columns, one of them text")
    for row in rows:
        yield rows.line_num, row["text"] or ""


def _lines(path: Path, content: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            _, tab, text = line.partition("\t")
            yield number, text if tab else line
