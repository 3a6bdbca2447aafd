"""Texts of mixed length as the load of a server of sentence vectors."""

import json
import random
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from benchmarks.paragraphs import paragraphs
from weir.embedding.checkpoint.reading import read_checkpoint
from weir.textserver import INSTALL, installed_model

TEXTS = 512  # asked for by turns: every server has them in the same order, again and again
STRATA = 8
MODEL = "all-minilm-l6-v2"


def model_directory() -> Path:
    """Return the folder of the model that is measured; end with how to install it."""
    folder = installed_model()
    if folder is None:
        raise SystemExit(f"the model that is measured is not installed: {INSTALL}")
    return folder


def sample(count: int = TEXTS) -> list[str]:
    """Return so many of the paragraphs of the standard library's docstrings, always the same, in an order by chance, but such that every
    STRATA in a row are of as many kinds of length: who gets on less far has not had shorter ones."""
    chance = random.Random(0)
    found = sorted(chance.sample(paragraphs(), count), key=len)
    kinds = [found[count * place // STRATA : count * (place + 1) // STRATA] for place in range(STRATA)]
    for kind in kinds:
        chance.shuffle(kind)
    rows = [[text for text in row if text is not None] for row in zip_longest(*kinds)]
    return [text for row in rows for text in chance.sample(row, len(row))]


def write_bodies(texts: Sequence[str], file: Path) -> Path:
    """Write a request for the vector of each text, one a line, in OpenAI's words."""
    file.write_text("".join(json.dumps({"input": text, "model": MODEL}) + "\n" for text in texts))
    return file


def lengths(texts: Sequence[str]) -> list[int]:
    """Return how many tokens the model reads of each text, in order of length."""
    checkpoint = read_checkpoint(model_directory())
    found = checkpoint.tokenizer().encode(texts, max_length=checkpoint.max_length, truncate=True)
    return sorted(len(each.ids) // 4 for each in found if not isinstance(each, Exception))


def described(texts: Sequence[str]) -> str:
    """Say how long the texts are."""
    counts = lengths(texts)
    shares = ", ".join(
        f"{percent} %: {counts[percent * (len(counts) - 1) // 100]}" for percent in (10, 25, 50, 75, 90, 99)
    )
    return (
        f"{len(texts)} paragraphs of the standard library's docstrings, of {counts[0]} to {counts[-1]} tokens, "
        f"{sum(counts) / len(counts):.1f} on average ({shares})"
    )
