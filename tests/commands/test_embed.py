"""`weir embed serve` as a user starts it."""

import html
import json
import re
from pathlib import Path

import httpx
import pytest
from examples.docstrings import labelled
from tests.images.pictures import drawn, written
from tests.rings import subcases
from tests.served import Served, in_shell, weir_here
from tests.text_models import tiny, tiny_towers
from tests.text_server.bert_as_service import bundles

from weir.bench.vectors import reserve_ports
from weir.commands.embed import COMMANDS, _numbers, _split
from weir.errors import SettingsError
from weir.text_server.server_settings import server_last, with_commas


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
        done = in_shell(command.replace("curl", "curl -sSf", 1))
        assert (done.returncode, done.stderr) == (0, ""), command


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


# `weir embed benchmark`.


def test_flags_of_the_server_stand_behind_the_directory() -> None:
    assert _split(["dir", "--workers", "2"]) == ("dir", ["--workers", "2"])
    assert _split(["--workers", "2"]) == (None, ["--workers", "2"]) and _split([]) == (None, [])
    with pytest.raises(SettingsError, match="one DIRECTORY"):
        _split(["one", "two"])


def test_the_flags_of_bert_serving_benchmark_are_taken_as_they_are() -> None:
    old = ["-model_dir", "dir", "-num_worker=4", "-cpu", "-max_batch_size", "8", "-port", "5555", "-port_out=5556"]
    tested = ["-test_client_batch_size", "1", "16", "-test_num_client", "-test_pooling_layer", "-1", "-2"]
    assert server_last(list(with_commas([*tested, "-num_repeat", "3", *old]))) == [
        "dir", "-test_client_batch_size", "1,16", "-test_num_client", "", "-test_pooling_layer", "-1,-2", "-num_repeat", "3",
        "--", "-num_worker=4", "-cpu", "-max_batch_size=8",
    ]  # fmt: skip
    assert server_last(["dir", "--clients", "1", "--", "-cpu", "x"]) == ["dir", "--clients", "1", "--", "-cpu", "x"]
    assert server_last(["dir", "-xla", "--batch-size", "2"]) == ["dir", "--batch-size", "2", "--", "-xla"]
    assert server_last(["dir", "-max_seq_len"]) == ["dir", "--", "-max_seq_len"]


def test_a_server_that_does_not_start_says_why_in_one_line(tmp_path: Path) -> None:
    only = ("-test_client_batch_size", "1", "2", "--length=", "--batch-size=", "--layer=")
    done = weir_here("embed", "benchmark", "-model_dir", tmp_path, *only)
    assert done.returncode == 2 and "the server did not start" in done.stderr and str(tmp_path) in done.stderr


def test_a_tiny_model_is_measured(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "small")
    only = ("-test_max_seq_len", "12", "-test_client_batch_size", "1", "4", "--test_num_client", "2", "--batch-size=")
    flags = ("--quick", "--layer=", "--text-length", "12", "--json", tmp_path / "tables.json")
    files = ("--markdown", tmp_path / "tables.md")
    server = ("--", "--no-calibrate", "--cache", tmp_path / "cache")
    env = {"WEIR_API_KEY": "of another server"}
    done = weir_here("embed", "benchmark", model, *only, *flags, *files, *server, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("###") == 3 and "| 4 |" in done.stdout
    assert "1 client, 4 texts a request: " in done.stderr
    assert (tmp_path / "tables.md").read_text().startswith(done.stdout[:100])
    tables = json.loads((tmp_path / "tables.json").read_text())["tables"]
    assert [table["rows"][0][0] for table in tables] == [12, 1, 2]
    assert "over ZeroMQ" in done.stderr


def test_results_that_could_not_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    done = weir_here("embed", "benchmark", tmp_path, "--json", tmp_path / "nowhere" / "tables.json")
    assert done.returncode == 2 and "nowhere" in done.stderr and "cannot be written" in done.stderr


def test_numbers_are_read_with_commas_or_spaces() -> None:
    assert _numbers("--clients", "1, 2,4 8") == [1, 2, 4, 8] and _numbers("--clients", "") == []
    assert _numbers("--layer", "-1,-2", negative=True) == [-1, -2]
    for said, negative in (("1,x", False), ("0", False), ("1", True), ("1.5", False)):
        with pytest.raises(SettingsError, match="must be"):
            _numbers("--clients", said, negative=negative)


# `weir embed convert`.


def test_a_checkpoint_becomes_a_directory_that_can_be_served(tmp_path: Path) -> None:
    original, made = tmp_path / "original", tmp_path / "made"
    bundles.write_original(original, labels=0)
    flags = ("-ckpt_name", "bert_model.ckpt", "-cased_tokenization")
    done = weir_here("embed", "convert", original, made, *flags)
    assert (done.returncode, done.stdout) == (0, f"wrote {made}: weir embed serve {made}\n"), done.stderr
    assert (made / "model.safetensors").is_file()


def test_what_cannot_be_converted_takes_one_line(tmp_path: Path) -> None:
    done = weir_here("embed", "convert", tmp_path, tmp_path / "made")
    assert done.returncode == 2 and done.stderr.startswith(f"weir: {tmp_path}") and done.stderr.count("\n") == 1


# `weir embed terminate` against a server that a command has started.


def test_a_server_ends_for_whom_it_obeys(tmp_path: Path) -> None:
    tiny.model(tmp_path / "model", layers=2)
    (tmp_path / "token").write_text("secret\n")
    with reserve_ports(2) as (port, port_out):
        flags = ("--cache", tmp_path / "cache", "--cpu", "--threads", "1", "--no-calibrate")
        ports = ("--zmq-port", port, "--zmq-port-out", port_out)
        guard = ("--control-token-file", tmp_path / "token")
        with Served(tmp_path / "model", *flags, *ports, *guard, command="embed serve") as served:
            url = served.until_printed(r"curl .*?(http://\S+)/encode")[1]
            zeromq = ("-ip", "127.0.0.1", "-port", port, "-port_out", port_out)
            key = ("--token-file", tmp_path / "token")
            for where in ((url,), zeromq):
                refused = weir_here("embed", "terminate", *where)
                assert refused.returncode != 0 and refused.stderr.count("\n") == 1
                assert "control token" in refused.stderr
            refused = weir_here("embed", "terminate", *zeromq, *key)
            assert refused.returncode == 2 and "over ZeroMQ no token can be sent" in refused.stderr
            done = weir_here("embed", "terminate", url, *key)
            assert done.returncode == 0 and "finishes what it has accepted, and stops" in done.stdout
            assert served.wait() == 0


def test_where_nobody_listens() -> None:
    done = weir_here("embed", "terminate", "http://localhost:1", "--port", "5555")
    assert done.returncode == 2 and "give either a URL, or --ip and --port" in done.stderr
    done = weir_here("embed", "terminate", "http://127.0.0.1:9", "--timeout", "1")
    assert done.returncode != 0 and "127.0.0.1:9" in done.stderr and done.stderr.count("\n") == 1
    done = weir_here("embed", "terminate", "-ip=127.0.0.1", "-port=9", "-timeout=100")  # milliseconds, as there
    assert done.returncode != 0 and "no response in time" in done.stderr and done.stderr.count("\n") == 1


# `weir embed search`, from files to what it prints.


def test_the_nearest_texts_are_shown(tmp_path: Path) -> None:
    """The file is a real one: every eighth paragraph of the example's."""
    model, texts = tiny.sentence_model(tmp_path / "model", "bert", layers=2), tmp_path / "docstrings.jsonl"
    lines = [json.dumps({"label": label, "text": text}) for label, text in labelled()][::8]
    texts.write_text("\n".join(lines))
    query = json.loads(lines[3])["text"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, env=cache)
    assert shown.returncode == 0 and "1.000" in shown.stdout.split("\n")[1]
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, "--json", env=cache)
    assert json.loads(shown.stdout.splitlines()[0])["place"] == 4


def test_the_nearest_pictures_are_shown(tmp_path: Path) -> None:
    model, photos = tiny_towers.model(tmp_path / "model"), tmp_path / "photos"
    photos.mkdir()
    (photos / "snow.png").write_bytes(written(drawn(30, 20)))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = weir_here("embed", "search", photos, "a dog", "--model", model, "--json", env=cache)
    assert json.loads(shown.stdout)["text"] == str(photos / "snow.png")


@subcases(
    ("words", "said"),
    [
        (("nothing.txt", "a"), "nothing.txt: cannot be read: No such file or directory"),
        ((__file__, ""), "QUERY: is empty, must be a text"),
    ],
)
def test_what_is_wrong_with_a_search_takes_one_line(words: tuple[str, ...], said: str) -> None:
    done = weir_here("embed", "search", *words)
    assert (done.returncode, done.stderr) == (2, f"weir: {said}\n")
