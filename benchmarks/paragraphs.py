"""Texts as people write them: the paragraphs of the standard library's docstrings, short and long."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FEWEST_LETTERS = 8


def paragraphs() -> list[str]:
    """Return all of them, each once, in the order of the files' names."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = (text for file in sorted(folder.glob("*.py")) for text in _of(file))
    return list(dict.fromkeys(found))


def _of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for text in (ast.get_docstring(node) or "").split("\n\n"):
                words = " ".join(text.split())
                if len(words) >= FEWEST_LETTERS:
                    yield words
