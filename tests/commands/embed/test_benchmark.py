"""`weir embed benchmark`."""

import json
from pathlib import Path

import pytest
from tests.served import weir_here
from tests.text_models import tiny

from weir.commands.embed import _numbers, _split
from weir.errors import SettingsError
from weir.text_server.server_settings import server_last, with_commas


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
    flags = ("--quick", "--layer=", "--no-small-and-large", "--text-length", "12", "--json", tmp_path / "tables.json")
    files = ("--markdown", tmp_path / "tables.md", "--figure", tmp_path / "tables.png")
    server = ("--", "--no-calibrate", "--cache", tmp_path / "cache")
    env = {"WEIR_API_KEY": "of another server"}
    done = weir_here("embed", "benchmark", model, *only, *flags, *files, *server, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("###") == 3 and "| 4 |" in done.stdout
    assert "1 client, 4 texts a request: " in done.stderr
    assert (tmp_path / "tables.md").read_text().startswith(done.stdout[:100])
    tables = json.loads((tmp_path / "tables.json").read_text())["tables"]
    assert [table["rows"][0][0] for table in tables] == [12, 1, 2]
    assert (tmp_path / "tables.png").stat().st_size and (tmp_path / "tables.svg").stat().st_size
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
