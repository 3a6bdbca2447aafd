"""The map of the house: the table of rooms and the picture, both from the order of imports in pyproject.toml.

`docs/generate.py` writes them; docs/explanation/architecture.md holds the table between two marks.
"""

import ast
import tomllib
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "weir"
PAGE = "docs/explanation/architecture.md"
PICTURE = "docs/pictures/architecture.svg"
BEGIN, END = "<!-- rooms: written by docs/generate.py -->", "<!-- end of rooms -->"

# The way of a request from left to right: the rooms that it passes, and what each does with it.
STATIONS = (
    ("callers", "", "HTTP, gRPC, WebSocket, ZeroMQ, Python"),
    ("channels", "frontends", "move bytes: fast path, ASGI, gRPC, WebSocket"),
    ("protocols", "protocols", "read bodies into requests, write responses"),
    ("registry", "catalog", "finds the service of the model"),
    ("service", "serving", "divides, submits, gathers, streams"),
    ("batcher", "batching", "queues by group, cuts batches"),
    ("workers", "workers", "decode, predict, encode, in processes"),
)
HELPERS = (
    ("policy", "policy", 5, "dispatch n, or wait until t"),
    ("tuning", "tuning", 4, "measures, solves again while serving"),
    ("telemetry", "telemetry", 3, "counts batches; metrics, traces, logs"),
)
BOX, STEP, TALL = 136, 158, 100
LINE = 20
"""Characters that fit into a line of a box in every common font, at 11 pixels."""


class Room(NamedTuple):
    """A part of the house: its dotted name, the rank of its layer (0: the lowest), and the first sentence of its docstring."""

    name: str
    rank: int
    purpose: str


def layers() -> list[list[str]]:
    """Return the layers of the import contract, the highest first, each a list of modules that do not know each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    ordered = next(
        each for each in contracts if each["type"] == "layers"
    )  # the first is the one of the whole house
    return [
        [name.strip() for name in layer.replace(":", "|").split("|")] for layer in ordered["layers"]
    ]


def file_of(module: str) -> Path:
    """Return the file of a dotted module below src; a package's is its __init__.py."""
    path = ROOT / "src" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def rooms() -> list[Room]:
    """Return all rooms, the lowest layer first."""
    ordered = layers()[::-1]
    return [
        Room(name, rank, _first_sentence(file_of(name)))
        for rank, layer in enumerate(ordered)
        for name in layer
    ]


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."


def table() -> str:
    """Return the rooms as a table in Markdown, the lowest layer first."""
    lines = ["| layer | part | what it is |", "| --- | --- | --- |"]
    for room in rooms():
        place = room.name.removeprefix("weir.").replace(".", "/")
        place += "/" if file_of(room.name).name == "__init__.py" else ".py"
        lines.append(
            f"| {room.rank} | `{place}` | {_in_short(room.purpose).replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines)


def _in_short(purpose: str) -> str:
    """Return what stands before a colon, where that says something."""
    head, colon, _ = purpose.partition(": ")
    return f"{head}." if colon and len(head.split()) > 2 else purpose


def page() -> str:
    """Return the page of the architecture with its table as it should be."""
    before, _, rest = (ROOT / PAGE).read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def picture() -> str:
    """Return the picture: a request's way through the rooms, and the rooms that help, as SVG."""
    width, height, top = 1112, 320, 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        '<path d="M0 0 L10 5 L0 10 z" fill="#30363d"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<rect x="{STEP}" y="20" width="{5 * STEP}" height="{height - 40}" rx="10" fill="#f4f7f9" stroke="#b8c4cc"/>',
        f'<text x="{STEP + 14}" y="{height - 32}" fill="#57606a">server process: one event loop</text>',
        f'<text x="{6 * STEP + 10 + BOX // 2}" y="{top + TALL + 22}" fill="#57606a" text-anchor="middle">worker processes</text>',
    ]
    for number, (title, room, text) in enumerate(STATIONS):
        left = 10 + number * STEP
        parts += _box(left, top, title, room, text)
        if number:
            parts.append(_arrow(left + BOX - STEP + 2, top + 36, left - 2, top + 36, both=True))
    for title, room, number, text in HELPERS:
        left, low = 10 + number * STEP, top + TALL + 38
        middle = left + BOX // 2
        parts += _box(left, low, title, room, text)
        if title == "telemetry":  # it listens to the service
            parts.append(_arrow(left + STEP, top + TALL + 2, middle + 40, low - 2, both=False))
        else:
            parts.append(_arrow(middle, low - 2, middle, top + TALL + 2, both=title == "policy"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(left: int, top: int, title: str, room: str, text: str) -> list[str]:
    middle = left + BOX // 2
    parts = [
        f'<rect x="{left}" y="{top}" width="{BOX}" height="{TALL}" rx="6" fill="#ffffff" stroke="#1f6f8b" stroke-width="1.5"/>',
        f'<text x="{middle}" y="{top + 22}" text-anchor="middle" fill="#30363d" font-weight="bold">{escape(title)}</text>',
    ]
    if room:
        parts.append(
            f'<text x="{middle}" y="{top + 38}" text-anchor="middle" fill="#1f6f8b" font-size="11">weir.{room}</text>'
        )
    parts += [
        f'<text x="{middle}" y="{top + 58 + 15 * row}" text-anchor="middle" fill="#57606a" font-size="11">{escape(line)}</text>'
        for row, line in enumerate(wrap(text, LINE))
    ]
    return parts


def _arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool) -> str:
    start = ' marker-start="url(#tip)"' if both else ""
    return f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#30363d" stroke-width="1.2" fill="none" marker-end="url(#tip)"{start}/>'
