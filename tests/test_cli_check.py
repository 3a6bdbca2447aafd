"""The command `weir check`, in a process of its own."""

import re

import pytest
from tests.served import MODELS, weir

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def target(name: str) -> str:
    return f"{MODELS}:{name}"


def test_check_shows_what_came_out_how_large_and_how_fast() -> None:
    run = weir("check", target("Square"))
    assert run.returncode == 0, run.stderr
    assert re.search(r"square: loaded and warmed up in [\d.]+ m?s", run.stdout)
    assert re.search(r"^3 +9 +1 B +[\d.]+ ms +ok", run.stdout, re.MULTILINE)
    assert re.search(r"^4 +16 +2 B +[\d.]+ ms +ok", run.stdout, re.MULTILINE)
    assert re.search(r"64 at once in [\d.]+ ms: [\d,]+ items/s", run.stdout)


def test_check_shows_what_is_wrong() -> None:
    run = weir("check", target("Wrong"))
    assert run.returncode == 1
    assert re.search(r"^3 +9 .*expected 10", run.stdout, re.MULTILINE)
    assert re.search(r"^'x' .*ModelError", run.stdout, re.MULTILINE)
    assert "at once" not in run.stdout
    unwritable = weir("check", target("Unwritable"))
    assert unwritable.returncode == 1 and "ModelError" in unwritable.stdout


def test_check_of_a_model_without_examples_says_so() -> None:
    run = weir("check", target("Plain"))
    assert run.returncode == 0 and "has no examples" in run.stdout


def test_check_of_a_model_that_cannot_be_loaded_shows_the_traceback() -> None:
    run = weir("check", target("Broken"))
    assert run.returncode == 1 and "FileNotFoundError: weights.bin is not there" in run.stderr
