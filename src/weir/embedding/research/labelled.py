"""Files of texts, with or without labels."""

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

from weir.errors import SettingsError

LARGEST = 1 << 28  # bytes


class Labelled(NamedTuple):
    """Texts, and the label of each; "" where there is none."""

    texts: list[str]
    labels: list[str]


def read_labelled(path: Path, *, labels: bool = True) -> Labelled:
    """Return the texts of a file, with `labels` those that each must have.

    .jsonl: an object per line with `text` and `label`, or without labels a string. .csv and .tsv: a first line that names the columns text and
    label. Any other file: a text per line, before it its label and a tab. Empty lines are passed over. Raises SettingsError naming the line.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise SettingsError(f"{path}: is larger than {LARGEST >> 20} MiB")
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    read = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table}.get(path.suffix, _lines)
    found = Labelled([], [])
    for number, text, label in read(path, content):
        if not text.strip():
            raise SettingsError(f"{path}, line {number}: has no text")
        if labels and not label:
            raise SettingsError(f"{path}, line {number}: has no label")
        found.texts.append(text)
        found.labels.append(label)
    if not found.texts:
        raise SettingsError(f"{path}: has no texts")
    return found


def _json_lines(path: Path, content: str) -> Any:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                said = json.loads(line)
            except ValueError as error:
                raise SettingsError(f"{path}, line {number}: must be JSON: {error}") from error
            table = {"text": said} if isinstance(said, str) else said
            if not (isinstance(table, dict) and isinstance(table.get("text"), str)):
                raise SettingsError(f'{path}, line {number}: must be an object with "text", or a text')
            yield number, table["text"], str(table.get("label", ""))


def _table(path: Path, content: str) -> Any:
    rows = csv.DictReader(content.splitlines(keepends=True), delimiter="\t" if path.suffix == ".tsv" else ",")
    if "text" not in (rows.fieldnames or ()):
        raise SettingsError(f"{path}: its first line must name the columns, one of them text")
    for row in rows:
        yield rows.line_num, row["text"] or "", row.get("label") or ""


def _lines(path: Path, content: str) -> Any:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            label, tab, text = line.partition("\t")
            yield (number, text, label) if tab else (number, line, "")
