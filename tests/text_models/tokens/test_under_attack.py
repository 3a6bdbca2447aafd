"""tokenizer.py with inputs that are long, and made to be dear: what the model does not read costs neither time nor memory."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.text_models import tiny

from weir.text_models.texts import TokenizerOptions, TokenRule, parse_text
from weir.text_models.tokenizer import LONG_WORD, LONGEST_WORD, Tokenizer

# Prints how many bytes of memory it takes to tokenize what `text` makes.
MEASURED = """
import resource, sys
from pathlib import Path
from weir.text_models.texts import TokenRule
from weir.text_models.tokenizer import Tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

tokenizer = Tokenizer(Path(sys.argv[1]))
tokenizer.encode([[1, 2, 3], ["a", "b"]], TokenRule(32))
text = {text}
before = peak()
tokenizer.encode([text], TokenRule(32))
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("text", ["[10, 11] * 500_000", '["abab", "baba"] * 200_000'], ids=["ids", "words"])
def test_of_many_ids_and_words_those_are_tokenized_that_the_model_reads(text: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED.format(text=text), str(tiny.model(tmp_path, kind))]
    measured = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(measured.stdout) < 50_000_000


def spent(work: Callable[[], object]) -> float:
    """Return how many seconds of CPU time `work` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def test_pairs_are_found_in_time_that_grows_with_the_text() -> None:
    texts = " ||| " * 40_000, "a" * 100_000 + "|||", " " * 200_000 + "|||" + " " * 200_000, "a ||| " * 40_000
    assert spent(lambda: [parse_text(text, "|||", 10) for text in texts]) < 1.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a ||| b ||| c", ("a ||| b", "c")),
        ("a ||| ", ("a ||| ",)),
        (" ||| b", (" ||| b",)),
        ("a ||| b ||| ", ("a", "b |||")),
        ("  a  |||  b\n", ("a", "b")),
        ("a|||b", ("a|||b",)),
        ("a ||| ||| b", ("a |||", "b")),
        ("|||", ("|||",)),
        (" ||| ", (" ||| ",)),
    ],
)
def test_a_pair_is_cut_at_the_last_separator_with_text_on_both_sides(text: str, parts: tuple[str, ...]) -> None:
    assert parse_text(text, "|||", 10).texts == parts


def test_words_that_are_almost_too_long_are_read_once() -> None:
    text = ("a" * (LONGEST_WORD - 1) + " ") * 300
    assert spent(lambda: LONG_WORD.sub("", text)) < 2.0
    assert LONG_WORD.sub("<>", f"{text}{'b' * LONGEST_WORD} c") == f"{text}<> c"


def test_words_without_tokens_do_not_end_a_list_of_words(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path)
    tokenizer, whole = Tokenizer(directory), Tokenizer(directory, TokenizerOptions(special_tokens=False))
    words = ["\u200b"] * 500 + ["a", "b"]
    for each in (tokenizer, whole):
        assert each.encode([words], TokenRule(8)) == each.encode([["a", "b"]], TokenRule(8))
