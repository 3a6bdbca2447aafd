"""Labelled texts to try things with: paragraphs of the docstrings of the standard library, labelled by their package.

python -m examples.docstrings > docstrings.tsv
weir embed search docstrings.tsv "wait until a task is done"
"""

import csv
import importlib
import inspect
import sys
from collections.abc import Iterator

MODULES = {
    "email": ("email.message", "email.header", "email.policy", "email.parser", "email.headerregistry", "email.charset"),
    "asyncio": ("asyncio.base_events", "asyncio.events", "asyncio.streams", "asyncio.tasks", "asyncio.locks"),
    "statistics": ("statistics", "random", "fractions"),
    "logging": ("logging", "logging.handlers", "logging.config"),
    "unittest": ("unittest.case", "unittest.mock", "unittest.suite", "unittest.runner"),
    "files": ("pathlib", "shutil", "tarfile", "tempfile", "zipfile"),
}
EACH = 60  # texts of a label
SHORTEST, LONGEST = 40, 600  # characters


def paragraphs(name: str) -> Iterator[str]:
    """Yield the paragraphs of all docstrings in a module, each once."""
    module = importlib.import_module(name)
    things = [module, *vars(module).values()]
    things += [each for thing in things if inspect.isclass(thing) for each in vars(thing).values()]
    for thing in things:
        if getattr(thing, "__module__", name) != name and thing is not module:
            continue
        for part in (inspect.getdoc(thing) or "").split("\n\n") if callable(thing) or thing is module else ():
            text = " ".join(part.split())
            if SHORTEST <= len(text) <= LONGEST and ">>>" not in text:
                yield text


def labelled() -> Iterator[tuple[str, str]]:
    """Yield labels and texts."""
    for label, names in MODULES.items():
        texts = dict.fromkeys(text for name in names for text in paragraphs(name))
        yield from ((label, text) for text in list(texts)[:EACH])


if __name__ == "__main__":
    table = csv.writer(sys.stdout, dialect="excel-tab")
    table.writerow(("label", "text"))
    table.writerows(labelled())
