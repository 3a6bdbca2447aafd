"""What a comparison hands back, and the page that it goes into."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.policies.lines import Effort

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "explanation" / "beyond-the-paper.md"


@dataclass
class Compared:
    """A table, and values for pictures."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)  # what more is to be said of it


class Comparison(NamedTuple):
    """One thing to compare. `steps(seeds)` is how often it calls `Effort.step`; `exact` is what has no
    lines of several seeds: it is not simulated, or says itself what it is played on."""

    name: str
    title: str
    steps: Callable[[int], int]
    compare: Callable[[Effort], Compared]
    exact: bool = False


def keep(name: str, compared: Compared, about: dict[str, Any]) -> None:
    """Store one comparison; it replaces an earlier one."""
    stored = stored_results()
    stored[name] = {**asdict(compared), "about": {**about, **compared.about}}
    RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def stored_results() -> dict[str, Any]:
    """Return what is stored, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_page() -> None:
    """Put every stored table between its marks in the page."""
    if not PAGE.exists():
        return
    text = PAGE.read_text()
    for name, stored in stored_results().items():
        begin, end = marks(name)
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{_section(name, stored)}\n{end}{after}"
    PAGE.write_text(text)


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a table stands in the page."""
    return f"<!-- {name}: written by `python -m benchmarks.policies` -->", f"<!-- end of {name} -->"


def _section(name: str, stored: dict[str, Any]) -> str:
    head = ["| " + " | ".join(stored["columns"]) + " |", "|" + " --- |" * len(stored["columns"])]
    rows = ["| " + " | ".join(row) + " |" for row in stored["rows"]]
    about = "; ".join(f"{key}: {value}" for key, value in stored["about"].items())
    return "\n".join([*head, *rows, "", f"<sub>`python -m benchmarks.policies {name}`;", f"{about}.</sub>"])
