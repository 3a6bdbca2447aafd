"""Counts in src/ the words and names that the field has better ones for: `python -m tests.words`.

A word counts once per line. Each count is to become 0; docs/explanation has the words that are meant instead.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "weir"
LINES = {
    "place for an index": r"\bfor place\b|\[place\]|\bplace: int\b",
    "so many, so much, so long": r"\bso (many|much|long)\b",
    "is no, is none": r"\b(is|are|was) (no [a-z]|none\b)",
    "answer for a response": r"(?i)answer",
    "unusual names": r"\b(TakesOver|Swept|Held|Shown|Added|_HASTE|HASTY_TIMES|press|pressed|ELSEWHERE|HandedOver)\b",
}
_FRAGMENT = re.compile(r"(What|Whose|Who|Where|That which)\b")


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes and of its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) is not None:
            yield text


def counts() -> dict[str, int]:
    """Return how many lines, or docstrings, have each kind of word."""
    sources = [path.read_text() for path in sorted(SOURCE.rglob("*.py"))]
    lines = [line for source in sources for line in source.split("\n")]
    found = {name: sum(bool(re.search(pattern, line)) for line in lines) for name, pattern in LINES.items()}
    fragments = sum(bool(_FRAGMENT.match(text)) for source in sources for text in docstrings(source))
    return {**found, "docstrings that are fragments": fragments}


if __name__ == "__main__":
    for name, count in counts().items():
        print(f"{count:6} {name}")
