"""Builds the site of the documentation into build/site: `python -m docs.site`, in an environment with the dependency group `docs`.

Zensical is the successor of Material for MkDocs by the same authors. It reads one folder, and the pages link to files beside that folder
too (CONTRIBUTING.md, CHANGELOG.md), so the pages are copied into build/pages first and their links turned to where things are there. The navigation is
the list in docs/contents.md: its parts, groups and links, in order.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")
BLOCK = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(rf"{BLOCK.pattern}|`[^`\n]*`", BLOCK.flags)
LABEL = re.compile(r" *<small>.*?</small>")  # of a method, in the title of what is searched
ENTRY = re.compile(
    r"^(?P<level>##+) (?P<heading>.+)$|^- \[(?P<title>[^\]]+)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE,
)


def pages() -> dict[Path, str]:
    """Return each page of the site: the file it is made of, and its path on the site."""
    inside = {path: path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))}
    beside = {
        path: path.name.lower() for path in sorted(ROOT.glob("*.md")) if path.name != "README.md"
    }
    return inside | beside


def on_site(text: str, source: Path, places: dict[Path, str]) -> str:
    """Return a page with its links as the site needs them. A link to a file that is not on the site becomes its text."""
    folder = Path(places[source]).parent

    def turn(found: re.Match[str]) -> str:
        target, hash_sign, anchor = found[2].partition("#")
        if not target or re.match(r"\w+:", target):
            return found[0]
        there = (source.parent / target).resolve()
        if there == ROOT / "README.md":
            there = DOCS / "index.md"
        place = places.get(there)
        if place is None and there.is_relative_to(DOCS) and there.is_file():
            place = there.relative_to(DOCS).as_posix()
        if place is None:
            return found[1][1:-1]
        return f"{found[1]}({os.path.relpath(place, folder)}{hash_sign}{anchor})"

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(turn, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(turn, text[end:])])


def navigation(contents: str) -> list[dict[str, Any]]:
    """Return the navigation that a table of contents says: parts (##), groups (###) and pages (- [title](path))."""
    parts: list[dict[str, Any]] = [{"Home": "index.md"}]
    into: list[dict[str, Any]] = parts
    part: list[dict[str, Any]] = parts
    for entry in ENTRY.finditer(contents):
        if entry["level"] == "##":
            into = part = []
            parts.append({entry["heading"]: part})
        elif entry["heading"]:
            into = []
            part.append({entry["heading"]: into})
        elif "#" not in entry["target"]:
            into.append({entry["title"]: entry["target"]})
    return [each for each in parts if all(each.values())] + [{"All pages": "contents.md"}]


def words(text: str) -> int:
    """Return how many words a reader meets on a page: what has a letter or a digit, without comments and blocks of code."""
    prose = re.sub(r"<!--.*?-->", "", BLOCK.sub("", text), flags=re.DOTALL)
    return sum(any(sign.isalnum() for sign in word) for word in prose.split())


def count() -> dict[str, int]:
    """Return the words of the README and of each page of docs/, generated ones included."""
    return {
        path.relative_to(ROOT).as_posix(): words(path.read_text())
        for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    }


def build() -> int:
    """Build the site; return the exit status, which is not 0 if a link or a name in it leads nowhere."""
    places = pages()
    staged = BUILD / "pages"
    shutil.rmtree(staged, ignore_errors=True)
    for source, place in places.items():
        target = staged / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(on_site(source.read_text(), source, places))
    for other in (
        path
        for path in DOCS.rglob("*")
        if path.suffix in (".png", ".svg", ".gif", ".webp", ".js", ".css")
    ):
        target = staged / other.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(other, target)
    nav = json.dumps(navigation((staged / "contents.md").read_text())).replace('": ', '" = ')
    settings = (DOCS / "zensical.toml").read_text()
    (BUILD / "zensical.toml").write_text(settings.replace("nav = []", f"nav = {nav}"))
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "--config-file",
        str(BUILD / "zensical.toml"),
    ]
    status = subprocess.run(command, cwd=BUILD, check=False).returncode
    _tidy(BUILD / "site" / "search.json")
    return status


def _tidy(path: Path) -> None:
    """Take from what is searched the list of all pages, and the labels of methods: whoever types "async" wants no method."""
    index = json.loads(path.read_text())
    index["items"] = [
        each | {"title": LABEL.sub("", each["title"])}
        for each in index["items"]
        if not each["location"].startswith("contents.")
    ]
    path.write_text(json.dumps(index))
    path.with_suffix(".js").write_text(f"var __index = {json.dumps(index)}")


if __name__ == "__main__":
    counted = count()
    sys.stdout.write(
        f"{sum(counted.values()):,} words on {len(counted)} pages, without blocks of code\n"
    )
    sys.stdout.flush()
    sys.exit(build())
