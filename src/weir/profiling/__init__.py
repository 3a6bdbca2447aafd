"""Measures a model through a real executor: service time and energy by batch size.

Here is what a model is measured with: settings, and items of its examples or of a file, in the form in which callers send them.
"""

import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

from weir.config import POSITIVE, check, setting
from weir.errors import SettingsError, WeirError, reason_of
from weir.messages import JSON, OBJECT
from weir.model import Example, Measure, Model, is_batched, is_tensor_model, overrides
from weir.wire.values import UNWRITABLE, decode, encode


@dataclass(frozen=True)
class ProfilingSettings:
    """The settings that say how thoroughly a model is measured."""

    sizes: list[int] = setting(
        [],
        "batch sizes to measure, in rows (default: 1 to 16, then in steps of a quarter, and the largest; between them, "
        "sudden steps are located)",
        metavar="NUMBERS",
    )
    seconds: float = setting(
        30.0,
        "time budget for measuring service times; measuring energy, where possible, takes extra time",
        rule=POSITIVE,
    )
    confidence: float = setting(
        0.02,
        "target half-width of each 95 % confidence interval, as a share of the mean",
        rule=(lambda value: 0 < value < 1, "must be a share, greater than 0 and less than 1"),
    )
    power: float | None = setting(
        None,
        "power of the device while it computes, in watts; used if its energy cannot be read",
        rule=POSITIVE,
        metavar="WATTS",
    )
    seed: int = setting(1, "seed for the order of sizes and the choice of items")

    def __post_init__(self) -> None:
        check(self)
        wrong = [size for size in self.sizes if not (isinstance(size, int) and size >= 1)]
        if wrong:
            raise SettingsError(f"sizes={wrong[0]!r}: must be whole numbers of rows, 1 or more")


class Entry(NamedTuple):
    """One item on its way to a worker, with its rows and its batch key."""

    payload: Any
    rows: int = 1
    key: Hashable = None


class RawItem(NamedTuple):
    """An item as an HTTP caller sends it, in the model's own content type."""

    content: bytes


class Items:
    """Items of which batches are made at random, each used equally often.

    `content_type` is their encoding: JSON, as over HTTP, if possible, else Python values; or the model's own. `accept`
    is the encoding of the responses (None: the same).
    """

    def __init__(
        self, entries: Sequence[Entry], content_type: str = OBJECT, seed: int = 1, accept: str | None = None
    ) -> None:
        self.entries = list(entries)
        self.content_type = content_type
        self.accept = content_type if accept is None else accept
        self._random = random.Random(seed)
        groups: dict[Hashable, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.key, []).append(entry)
        self._decks = [_Deck(group, self._random) for group in groups.values()]  # by batch key

    def __len__(self) -> int:
        return len(self.entries)

    def can_fill(self, rows: int) -> bool:
        """Return whether there are items that make a batch of exactly `rows` rows."""
        return any(deck.can_fill(rows) for deck in self._decks)

    def batch(self, rows: int) -> list[Any]:
        """Return the payloads of a batch of `rows` rows. `can_fill(rows)` must be true."""
        decks = [deck for deck in self._decks if deck.can_fill(rows)]
        (deck,) = self._random.choices(decks, [len(deck.entries) for deck in decks])
        return deck.batch(rows)


class _Deck:
    """Deals entries without end: all of them in random order before any comes again."""

    def __init__(self, entries: list[Entry], chance: random.Random) -> None:
        self.entries = entries
        self._sizes = {entry.rows for entry in entries}
        self._chance = chance
        self._left: list[Entry] = []
        self._reached = [True]  # by number of rows: whether entries can add up to it

    def can_fill(self, rows: int) -> bool:
        for total in range(len(self._reached), rows + 1):
            self._reached.append(any(size <= total and self._reached[total - size] for size in self._sizes))
        return self._reached[rows]

    def batch(self, rows: int) -> list[Any]:
        payloads: list[Any] = []
        while rows:
            entry = self._deal()
            if entry.rows <= rows and self._reached[rows - entry.rows]:
                payloads.append(entry.payload)
                rows -= entry.rows
        return payloads

    def _deal(self) -> Entry:
        if not self._left:
            self._left = self._chance.sample(self.entries, len(self.entries))
        return self._left.pop()


def items_of(model: type[Model], items: Iterable[Any] | None = None, *, seed: int = 1) -> Items:
    """Return `items`, or the model's examples, in the form in which they travel to a worker.

    Each row of a tensor model is an entry of its own. Raises SettingsError if there are no items, or an invalid one.
    """
    given = model.examples if items is None else list(items)
    values = [each.item if isinstance(each, Example) else each for each in given]
    if not values:
        raise SettingsError(
            _no_items(model) if items is None else f"items: none given to measure {model.__name__} with"
        )
    if all(isinstance(value, RawItem) for value in values):
        return _bodies(model, [value.content for value in values], seed)
    if is_tensor_model(model):
        return Items(list(_rows_of(model, values)), OBJECT, seed)
    measured = [_measured(model, value) for value in values]
    entries = [Entry(value, each.rows, each.key) for value, each in zip(values, measured, strict=True)]
    if not all(map(_is_plain_json, values)):
        return Items(entries, OBJECT, seed)
    return Items([entry._replace(payload=encode(entry.payload, JSON)) for entry in entries], JSON, seed)


def _bodies(model: type[Model], contents: list[bytes], seed: int) -> Items:
    if not model.content_types:
        raise SettingsError(
            f"items: {model.__name__} reads no content types of its own, so its items are in a .jsonl, .json or .npz file"
        )
    content_type = model.content_types[0].lower()
    accept = content_type if overrides(model, "encode") else JSON  # as HTTP answers callers without a preference
    return Items([Entry(content) for content in contents], content_type, seed, accept)


def _no_items(model: type[Model]) -> str:
    return (
        f"{model.__name__}: there is nothing to measure it with: give the class `examples = [...]`; `weir profile` also takes "
        "a file of items (--items items.jsonl; items=[...] in Python)"
    )


def _measured(model: type[Model], value: Any) -> Measure:
    try:
        measure = model.measure(value)
    except Exception as error:  # whatever the model's own code raises
        raise SettingsError(f"{model.__name__}.measure cannot measure the item {value!r:.100}: {error!r}") from error
    return Measure() if measure is None else Measure(measure) if isinstance(measure, int) else measure


def _is_plain_json(value: Any) -> bool:
    """Return whether an HTTP caller can send `value` so that the worker reads the same value."""
    try:
        read = decode(encode(value, JSON), JSON)
        return type(read) is type(value) and bool(read == value)
    except (*UNWRITABLE, WeirError):
        return False


def _rows_of(model: type[Model], values: Iterable[Any]) -> Iterator[Entry]:
    from weir.wire.tensors import rows_of, shape_key, to_arrays  # only tensor models need numpy

    for value in values:
        arrays = to_arrays(value, model.inputs, SettingsError)
        key = shape_key(arrays, model.inputs)
        if not is_batched(model):
            yield Entry(arrays, 1, key)
            continue
        for row in range(rows_of(arrays)):
            yield Entry({name: array[row : row + 1] for name, array in arrays.items()}, 1, key)


# Reads the items to measure with from a file or a folder.


def read_items(path: Path) -> list[Any]:
    """Return the items in the file or folder `path`, at least one.

    In a folder every file is a body in the model's own content type (an image, say). A file `.npz` has named arrays of
    equal length for a tensor model; their rows are the items. A file `.jsonl` has one item in JSON on each line. Any
    other file has either that or one JSON list. Raises SettingsError naming the file and, where there are lines, the
    line.
    """
    try:
        items = _items(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"items={path}: cannot be read: {reason_of(error)}") from error
    if not items:
        raise SettingsError(f"items={path}: has no items")
    return items


def _items(path: Path) -> list[Any]:
    if path.is_dir():
        return [RawItem(file.read_bytes()) for file in sorted(path.iterdir()) if file.is_file()]
    return _rows(path) if path.suffix == ".npz" else _values(path.read_text("utf-8-sig"), path)


def _values(text: str, path: Path) -> list[Any]:
    if path.suffix not in (".jsonl", ".ndjson"):
        with suppress(WeirError):
            whole = decode(text.encode(), JSON)
            return whole if isinstance(whole, list) else [whole]
    return [_line(line, number, path) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _line(line: str, number: int, path: Path) -> Any:
    try:
        return decode(line.encode(), JSON)
    except WeirError as error:
        raise SettingsError(
            f"items={path}: line {number}: {error.message}; must be a JSON list, or one item in JSON on each line"
        ) from None


def _rows(path: Path) -> list[Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, BadZipFile) as error:
        raise SettingsError(f"items={path}: must be arrays saved by numpy.savez: {error}") from error
    return [arrays] if arrays else []
