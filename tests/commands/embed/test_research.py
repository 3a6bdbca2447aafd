"""`weir embed layers` and `weir embed search`, from files to what they print."""

import json
from pathlib import Path

import pytest
from examples.docstrings import labelled
from tests.rings import subcases
from tests.served import weir_here
from tests.text_models import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.sentence_model(tmp_path_factory.mktemp("model"), "bert", layers=2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real labelled file: every eighth paragraph of the example's."""
    path = tmp_path_factory.mktemp("texts") / "docstrings.jsonl"
    lines = [json.dumps({"label": label, "text": text}) for label, text in labelled()]
    path.write_text("\n".join(lines[::8]))
    return path


def test_layers_are_shown_and_drawn(model: Path, texts: Path, tmp_path: Path) -> None:
    files = ("-o", tmp_path / "a.png", "--json", tmp_path / "a.json")
    shown = weir_here("embed", "layers", texts, "--model", model, *files, env={"XDG_CACHE_HOME": str(tmp_path / "c")})
    assert shown.returncode == 0, shown.stderr
    assert "mean: kNN accuracy" in shown.stdout and "│ -2" in shown.stdout and "Written" in shown.stdout
    assert (tmp_path / "a.png").exists() and (tmp_path / "a.svg").exists()
    assert json.loads((tmp_path / "a.json").read_text())["cls"].keys() == {"-2", "-1"}


def test_the_nearest_texts_are_shown(model: Path, texts: Path, tmp_path: Path) -> None:
    query = json.loads(texts.read_text().split("\n")[3])["text"]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, env=cache)
    assert shown.returncode == 0 and "1.000" in shown.stdout.split("\n")[1]
    shown = weir_here("embed", "search", texts, query, "--model", model, "-n", 2, "--json", env=cache)
    assert json.loads(shown.stdout.splitlines()[0])["place"] == 4


@pytest.mark.parametrize("command", ["layers", "search"])
def test_a_file_that_is_not_there_takes_one_line(command: str, model: Path) -> None:
    said = weir_here("embed", command, "nothing.txt", *(["query"] if command == "search" else []), "--model", model)
    assert (said.returncode, said.stderr) == (
        2,
        "weir: nothing.txt: cannot be read: [Errno 2] No such file or directory: 'nothing.txt'\n",
    )


def test_without_matplotlib_layers_have_their_table(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("options", "embed"):
        monkeypatch.setattr(f"weir.commands.{module}.can_draw", lambda: False)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    install = "it needs matplotlib; add Weir's extra 'plots': pip install 'weir-serving[plots]'"
    shown = weir_here("embed", "layers", texts, "--model", model, env=cache, cwd=tmp_path)
    assert shown.returncode == 0 and "mean: kNN accuracy" in shown.stdout and f"No picture: {install}" in shown.stdout
    assert not list(tmp_path.glob("layers.*"))
    refused = weir_here("embed", "layers", texts, "--model", model, "-o", "a.png", env=cache, cwd=tmp_path)
    assert refused.returncode == 2
    assert "--output: drawing needs matplotlib; add Weir's extra 'plots': pip install" in refused.stderr


@subcases(
    ("words", "said"),
    [
        (("layers", "nothing.txt"), "nothing.txt: cannot be read: [Errno 2] No such file or directory: 'nothing.txt'"),
        (
            ("search", "nothing.txt", "a"),
            "nothing.txt: cannot be read: [Errno 2] No such file or directory: 'nothing.txt'",
        ),
        (("search", __file__, ""), "QUERY: is empty, must be a text"),
    ],
)
# as test_a_file_that_is_not_there_takes_one_line
def test_what_is_wrong_takes_one_line(words: tuple[str, ...], said: str, model: Path) -> None:
    done = weir_here("embed", *words, "--model", model)
    assert (done.returncode, done.stderr) == (2, f"weir: {said}\n")
