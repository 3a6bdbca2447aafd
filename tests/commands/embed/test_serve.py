"""`weir embed serve` as a user starts it."""

import html
import re
import subprocess
from pathlib import Path

import httpx
from tests.rings import subcases
from tests.served import Served, weir_here
from tests.text_models import tiny

from weir.commands.embed import COMMANDS


@subcases(("name", "example"), COMMANDS.items())
def test_the_help_of_a_command_has_an_example(name: str, example: str) -> None:
    assert f"Example: {example}" in weir_here("embed", name, "--help", env={"COLUMNS": "300"}).stdout
    assert example.startswith(f"weir embed {name} ")


def test_the_help_shows_the_settings_and_not_the_old_flags() -> None:
    shown = weir_here("embed", "serve", "--help=all", env={"COLUMNS": "300"}).stdout
    settings = "--pooling --max-length --zmq-port --max-texts --workers --tls-certfile --no-truncate"
    assert all(flag in shown for flag in settings.split())
    # Not the defaults of `weir serve`.
    assert "autoscales (default: CPUs / --threads" in shown
    assert "Largest batch, in rows; 1 disables batching (default: measured, see --calibrate" in shown
    assert "--max-seq-len" not in shown and "--model-repository" not in shown


def test_what_is_wrong_takes_one_line(tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model")
    for arguments, said in (
        ((tmp_path / "nowhere",), f"{tmp_path}/nowhere: must be a directory with a model"),
        ((model, "--pooling_strategy", "MEDIAN"), "weir: -pooling_strategy='MEDIAN': must be one of"),
        ((model, "-num_worker=none"), "weir: -num_worker='none': must be 1 or more, or the fewest and the most"),
        ((model, "-num_labels", "2"), "-num_labels: is not supported: it is read from the model's files"),
        ((model, "-port", "x"), "weir: -port='x': must be a whole number"),
        ((model, "--payload-limit", "x"), "weir: --payload-limit='x': must be a whole number"),
        ((model, "--device", "tpu"), "weir: --device=['tpu']: each must be auto, cpu, cuda, or the number of a GPU"),
        ((model, "--max_seq_len", "1000"), "model: max_length=1000: the model reads at most 64 tokens"),
    ):
        done = weir_here("embed", "serve", *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr


def assert_that_shown_calls_work(url: str) -> None:
    """Run each command of the home page in a shell, as who pastes it does."""
    page = httpx.get(url, headers={"accept": "text/html"}).text
    commands = [html.unescape(each) for each in re.findall("<pre>(.*?)</pre>", page)]
    assert {"/v1/embeddings", "/embed", "/encode"} <= {each.removeprefix(url) for each in " ".join(commands).split()}
    for command in commands:
        done = subprocess.run(["bash", "-c", command.replace("curl", "curl -sSf", 1)], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), command


def test_it_measures_once_serves_and_drains(tmp_path: Path) -> None:
    """The old flags too; the second start takes what the first has found."""
    model = tiny.model(tmp_path / "model", layers=2)
    flags = ("--cache", tmp_path / "cache", "-cpu", "--threads", "1")
    old = ("-pooling_strategy", "CLS_TOKEN", "-http_max_connect=9", "-port=0")
    logs: list[str] = []
    for _ in range(2):
        with Served(model, *flags, *old, command="embed serve") as served:
            url = served.until_printed(r"curl .*?(http://\S+)/encode")[1]
            answer = httpx.post(f"{url}/encode", json={"id": 1, "texts": ["first do it"]}).json()
            assert len(answer["result"][0]) == tiny.HIDDEN
            assert httpx.get(f"{url}/status/server").json()["pooling_strategy"] == 4
            if not logs:
                assert_that_shown_calls_work(url)
            served.process.terminate()
            assert served.wait() == 0
            assert served.process.stderr is not None
            logs.append(served.process.stderr.read())
    assert len(list((tmp_path / "cache").glob("budgets/*"))) == 1
    first, second = (log.count("measuring how large batches should be") for log in logs)
    assert first >= 4 and second == 0  # at 0 %, 25 % and so on
