"""The commands that `weir serve` prints to be copied do what they say; `weir check` and `weir profile` of streaming models and chains."""

import io
import json
import os
import pty
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from rich.table import Table
from tests.catalog.repository.shelf import write
from tests.served import in_shell, serving, target, weir
from tests.test_on_demand import fill
from tests.workers.models import Echo

from weir import Service, console
from weir.testing import FakeExecutor

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_name_and_no_address_is_broken_in_a_narrow_terminal(columns: str) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("model", "routes", "url"):
        table.add_column(column, no_wrap=True)
    name = "a-name-of-a-model-that-is-rather-long"
    table.add_row(name, f"/infer/{name} /mood", "http://127.0.0.1:12345")
    leader, follower = pty.openpty()
    environment = mock.patch.dict(os.environ, {"COLUMNS": columns, "TERM": "xterm"})
    with open(follower, "w") as terminal, mock.patch.object(sys, "stdout", terminal), environment:
        console._print(table)
    shown = os.read(leader, 10_000).decode()
    os.close(leader)
    assert re.search(rf"/infer/{name} /mood\s", shown) and re.search(r"http://127.0.0.1:12345\s", shown)
    assert ("url: http" in shown) == (columns == "80")
    assert max(map(len, shown.splitlines())) <= int(columns)


def test_the_workers_of_each_version_are_shown_while_they_load() -> None:
    shown = io.StringIO()
    with mock.patch.object(console, "Console", lambda **_: Console(file=shown, force_terminal=True, width=80)):
        loading = console.Loading()
    services = [Service(Echo, name="clip", version=version, executor=FakeExecutor()) for version in ("", "images")]
    loading.show(services)
    for service in services:
        loading.worker_changed(service.label, 0, "ready", "")
    loading.close()
    last = shown.getvalue().rpartition("loading clip ")[2]
    assert last.count("1/1") == 2 and "loading clip/images" in last


def test_each_model_has_a_command_that_is_answered(tmp_path: Path) -> None:
    (tmp_path / "FILE").write_bytes(b"1234567")
    names = ["Typed", "Struct", "Arrays", "Large", "Words", "Upload", "Picture", "Untyped"]
    targets = [f"{Path(__file__).parent}/console_models.py:{name}" for name in names]
    with serving(*targets, "--executor", "thread", "--max-batch-size", "1") as (served, _):
        lines = [line.strip() for line in re.findall(r"^  curl .*", served.table, re.MULTILINE)]
        commands = {line.rpartition("/")[2]: line for line in lines}
        assert commands["large"].startswith("curl -d JSON ") and commands["untyped"].startswith("curl -d JSON ")
        answers = {
            name: in_shell(f"{line} -sS -m 20", cwd=tmp_path).stdout
            for name, line in commands.items()
            if name not in ("large", "untyped")
        }
    assert json.loads(answers["typed"]) == "point" and json.loads(answers["struct"]) == 1
    assert json.loads(answers["arrays"]) == {"x": [[[0.0], [0.0]]], "names": ["text"]}
    assert "it's" in answers["words"] and "here" in answers["words"]
    assert json.loads(answers["picture"]) == 7 and json.loads(answers["upload"]) > 100


def test_a_server_whose_models_are_all_on_demand_prints_no_empty_table(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "5GB")
    with serving(*flags) as (served, client):
        first, _, last = served.table.splitlines()
        assert first == f"on demand: 1 model, for example: curl -d ITEM {served.url}/infer/m0"
        assert last == f"Ready at {served.url}"
        assert client.post("/infer/m0", json=3).json() == ["m0", 3]


COUNT = f"{Path(__file__).parent / 'streaming_models.py'}:Count"


def test_check_shows_all_answers() -> None:
    done = weir("check", COUNT)
    assert done.returncode == 0, done.stderr
    assert "[1, 2]" in done.stdout
    assert "--fronts would not help: it streams, so the server process reads its requests" in done.stdout


def test_check_starts_the_steps_of_a_chain(tmp_path: Path) -> None:
    file = tmp_path / "chained.py"
    file.write_text(CHAINED)
    done = weir("check", f"{file}:Half", f"{file}:Quarter")
    assert done.returncode == 0, done.stderr
    assert "2.5" in done.stdout and "--fronts" not in done.stdout
    alone = weir("check", f"{file}:Quarter")
    assert "step 'half': unknown model 'half'" in alone.stderr


def test_one_worker_is_tried_and_measured_of_a_model_with_two_kinds(tmp_path: Path) -> None:
    config = tmp_path / "weir.toml"
    config.write_text('[models.count]\nworkers = 2\nworker_kinds = ["large", "small"]\n')
    done = weir("check", COUNT, "--config", config)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "count.toml"
    done = weir("profile", COUNT, "--config", config, "--sizes", "1,8", "--seconds", "0.1", "--output", path)
    assert done.returncode == 0 and path.exists(), done.stderr
    config.write_text('[models.count]\nworkers = 1\nworker_kinds = ["large", "small"]\n')
    refused = weir("check", COUNT, "--config", config)  # as it would be served
    assert "workers=1: no worker is of the kind 'small'; have more workers" in " ".join(refused.stderr.split())
    refused = weir("profile", COUNT, "--worker-kinds", "large")
    assert "No such option: --worker-kinds" in refused.stderr


def test_check_says_how_to_write_predict_for_a_list(tmp_path: Path) -> None:
    file = tmp_path / "single.py"
    file.write_text(SINGLE)
    done = weir("check", f"{file}:Square")
    assert done.returncode != 0
    assert "so you may have written it for one: return [f(item) for item in batch]" in " ".join(
        (done.stdout + done.stderr).split()
    )


SINGLE = """
import weir

class Square(weir.Model):
    examples = [3]

    def predict(self, x):
        return x ** 2
"""

CHAINED = """
import weir

class Half(weir.Model):
    def predict(self, batch):
        return [x / 2 for x in batch]

class Quarter(weir.Chain):
    steps = ["half", "half"]
    examples = [10]
"""


# The command `weir check`, in a process of its own.


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
