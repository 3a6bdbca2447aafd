"""The tables of sentence vectors in files: as Markdown or JSON, and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weir.bench.vector_tables import Table
from weir.figures import figure, styles

_ACROSS = 3  # panels in a row


def as_json(tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return `tables` and what they were measured on as an object of `tables` and `machine`."""
    said = {"machine": machine, "tables": [table._asdict() for table in tables]}
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode() + "\n"


def as_markdown(tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return `tables` as Markdown, what they were measured on below."""
    return "\n".join([*(table.markdown() for table in tables), f"<sub>{_listed(machine)}.</sub>\n"])


def _listed(facts: Mapping[str, Any]) -> str:
    inner = ((name, _listed(each) if isinstance(each, Mapping) else each) for name, each in facts.items())
    return ", ".join(f"{name} {each}" for name, each in inner)


def draw(tables: Sequence[Table], path: Path) -> None:
    """Write `path` as PNG and SVG: a panel for each table whose first column is what was changed. Raises SettingsError without matplotlib."""
    shown = [table for table in tables if table.columns[1].startswith("texts/s")]
    across = min(_ACROSS, max(1, len(shown)))
    with figure(path, -(-max(1, len(shown)) // across), across) as (_, axes):
        for each in axes.flat[len(shown) :]:
            each.set_visible(False)
        for each, table in zip(axes.flat, shown, strict=False):
            _panel(each, table)


def _panel(axes: Any, table: Table) -> None:
    first, *rates = zip(*table.rows, strict=True)
    places = range(len(first))
    for name, rate, style in zip(table.columns[1:], rates, styles(), strict=False):
        axes.plot(places, rate, label=name, **style)
    axes.set_xticks(places, [f"{value:,}" for value in first], fontsize=7, rotation=45 if len(first) > 6 else 0)
    axes.set_title(table.title, fontsize=9)
    axes.set(xlabel=table.columns[0], ylabel="texts/s")
    axes.set_ylim(bottom=0)
    if len(rates) > 1:
        axes.legend(fontsize=8)
