"""The command `weir check`, in a process of its own."""

import re
from pathlib import Path

import pytest
from tests.catalog.repository.shelf import write
from tests.served import target, weir

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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


ECHO = """
import weir

class Echo(weir.Model):
    examples = [1]

    def predict(self, batch):
        return batch
"""


def test_check_of_a_repository_checks_each_model_and_the_memory(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}/1/model.py": ECHO for name in ("good", "large", "unread")})
    broken = ECHO + "    def load(self):\n        raise OSError('no weights')\n"
    write(
        tmp_path, {"large/config.toml": 'needs_memory = "6GB"\n', "unread/1/model.py": "(", "broken/1/model.py": broken}
    )
    memory = ("--model-control", "on-demand", "--model-memory", "5GB")
    run = weir("check", "--model-repository", tmp_path, *memory)
    assert run.returncode == 1, run.stderr
    assert len(re.findall(r"^1 +1 +1 B +[\d.]+ ms +ok", run.stdout, re.MULTILINE)) == 2
    assert re.search(r"its worker takes [\d.]+MB of memory", run.stdout)
    assert "large/1: it takes 6GB, and model_memory=5GB is for all models together; raise" in run.stdout
    assert re.search(r"^unread/1: .*SyntaxError", run.stdout, re.MULTILINE)
    assert re.search(r"^broken/1: .*OSError: no weights", run.stdout, re.MULTILINE)
    alone = weir("check", tmp_path, "--load", "good", *memory)
    assert alone.returncode == 0, alone.stdout + alone.stderr
