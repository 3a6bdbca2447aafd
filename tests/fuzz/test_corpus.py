"""Everything that a fuzzer has kept, once through its target."""

from pathlib import Path

import pytest
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_breaks_no_promise(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    for file in kept:
        TARGETS[name](file.read_bytes())
