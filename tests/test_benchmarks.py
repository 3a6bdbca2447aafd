"""The harness of the benchmarks: what it counts and what it writes. The measurements themselves are no tests."""

import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import report, servers
from benchmarks.harness import result as results
from benchmarks.harness.report import PARTS
from benchmarks.harness.result import Result
from benchmarks.parts.ray_more import MORE as PART


def result() -> Result:
    made = Result(["server", "requests/s"], rows=[["Weir", "100"]], notes=["A note."], values={"Weir 64": 100.0})
    made.goal("at least 90", "100", True)
    return made


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, path in {
        "ROOT": ".", "RESULTS": "results.json", "PAGE": "docs/benchmarks.md", "PICTURE": "docs/p.png", "README": "README.md",
    }.items():  # fmt: skip
        monkeypatch.setattr(report, name, tmp_path / path)
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


def test_a_part_measured_again_replaces_its_figures_only(folder: Path) -> None:
    report.keep(PART, result(), {})
    report.keep(PARTS["overload"], result(), {})
    again = result()
    again.rows = [["Weir", "200"]]
    report.keep(PART, again, {"processor": "two cores"})
    assert report.write() == ["docs/benchmarks.md"]
    page = (folder / "docs/benchmarks.md").read_text()
    assert f"## {PART.title}\n\n{PART.about}" in page and "A note." in page and "- processor: two cores" in page
    assert "| server | requests/s |\n| --- | --- |\n| Weir | 200 |" in page
    assert "at least 90" not in page  # goals are for who works on it
    assert page.index(PARTS["overload"].title) < page.index(PART.title)


def test_the_readme_says_between_its_marks_what_one_gains(folder: Path) -> None:
    stored: dict[str, Any] = {name: {"values": {}} for name in ("square", "in-process", "large-bodies")}
    stored["vectors"] = {"values": {"Weir 64": 90.0, "sentence-transformers, FastAPI 64": 30.0}}
    assert report._write_readme(stored)
    text = (folder / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "**90 sentences a second**" in text and "encodes 30. That is **3.0 times as many**" in text


def test_the_page_says_where_others_are_faster_and_takes_their_best() -> None:
    values = {"square: Weir 64": 90.0, "square: LitServe 64": 30.0, "square: LitServe, fast 64": 180.0}
    assert report._best(values, "LitServe", "square: {} 64") == ["LitServe, fast"]
    assert report._best(values, "BentoML", "square: {} 64") == []
    assert report._faster(values) == [
        "Square over HTTP (connections: 64): LitServe, fast serves up to 2.0 times as many."
    ]


def test_a_server_that_is_ended_leaves_no_process_behind() -> None:
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    front = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    process = subprocess.Popen([sys.executable, "-c", front], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as words:
        assert words.readline() == b"ready\n"
        servers._end(process)
        assert words.read() == b""  # the worker, which held it open, is gone


def test_a_measurement_that_was_stopped_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "build")
    source = tmp_path / "source.py"
    source.write_text("1")
    begun: list[int] = []

    def find(first: int) -> Iterator[list[float]]:
        begun.append(first)
        return ([number, inf] for number in range(first, 5))

    some = results.resumed("numbers", [source], find)
    assert [next(some), next(some)] == [[0, inf], [1, inf]]
    with next((tmp_path / "build").iterdir()).open("a") as file:
        file.write("[2, Inf")  # it was killed
    assert list(results.resumed("numbers", [source], find)) == [[number, inf] for number in range(5)]
    source.write_text("2")  # what it finds may be something else now
    assert len(list(results.resumed("numbers", [tmp_path], find))) == 5
    assert begun == [0, 2, 0]
