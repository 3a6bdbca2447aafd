"""The harness of the benchmarks: what it counts and what it writes. The measurements themselves are no tests."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.harness import report, servers, texts
from benchmarks.harness import result as results
from benchmarks.harness.report import PARTS
from benchmarks.harness.result import Result, ratio, rotated, short, spread
from benchmarks.harness.texts import COLUMNS, compare
from benchmarks.parts import classes, overload, padding, text_memory
from benchmarks.parts.overload import OpenLoop
from benchmarks.parts.padding import simulate
from benchmarks.parts.ray_more import MORE as PART
from tests.rings import subcases


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


def test_writes_what_was_measured_and_on_what(folder: Path) -> None:
    report.keep(PART, result(), {"processor": "two cores"})
    assert report.write() == ["docs/benchmarks.md"]
    page = (folder / "docs/benchmarks.md").read_text()
    assert f"## {PART.title}\n\n{PART.about}" in page
    assert "| server | requests/s |\n| --- | --- |\n| Weir | 100 |" in page
    assert "at least 90" not in page  # goals are for who works on it
    assert "A note." in page and "- processor: two cores" in page


def test_a_part_measured_again_replaces_its_figures_only(folder: Path) -> None:
    report.keep(PART, result(), {})
    report.keep(PARTS["overload"], result(), {})
    again = result()
    again.rows = [["Weir", "200"]]
    report.keep(PART, again, {})
    report.write()
    page = (folder / "docs/benchmarks.md").read_text()
    assert "| Weir | 200 |" in page and "| Weir | 100 |" in page
    assert page.index(PARTS["overload"].title) < page.index(PART.title)


def test_the_page_shows_chosen_columns_of_what_is_stored() -> None:
    for name, part in json.loads(report.RESULTS.read_text()).items():
        columns, rows = report.shown(name, part["columns"], part["rows"])
        assert all(len(row) == len(columns) for row in rows)
    cells = [["chat", "15 s", "a", "5.28 (5 to 6)", "6.44 (target=4: 8.4 s)", "", "", "18 %", "0 %", "1 %"]]
    assert report.shown("autoscaling", [], cells)[1][0][2:4] == ["5.28", "6.44"]
    assert report.shown("other", ["requests/s", "off"], [["12 (1,000 to 2.5)", "1 (-1 to 2)"]])[1] == [
        ["12 (1,000–2.5)", "1 (-1 to 2)"]
    ]


def test_the_readme_says_between_its_marks_what_one_gains(folder: Path) -> None:
    stored: dict[str, Any] = {name: {"values": {}} for name in ("square", "in-process", "large-bodies")}
    stored["vectors"] = {"values": {"Weir 64": 90.0, "sentence-transformers, FastAPI 64": 30.0}}
    assert report._write_readme(stored)
    text = (folder / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "**90 sentences a second**" in text and "encodes 30. That is **3.0 times as many**" in text


def test_the_page_compares_square_with_every_peer_that_was_measured() -> None:
    values = report._values({
        "square": {"values": {"Weir 64": 90.0, "mosec 64": 30.0, "times mosec 64": 3.1, "LitServe 64": 9.0, "Weir 256": 1.0, "mosec 256": 1.0,
                              "times mosec 256": 1.0}},
        "in-process": {"values": {f"{name} {loop}": 1.0 for name in ("Weir", "mpservice", "times mpservice") for loop in ("asyncio", "uvloop")}},
        "large-bodies": {"values": {"Weir": 1.0, "mosec": 1.0, "times mosec": 1.0}},
    })  # fmt: skip
    table = report._figures(values)
    assert "| square over HTTP, 64 connections, requests/s | 90 | LitServe: 9 | 10.0 |" in table
    assert "| square over HTTP, 64 connections, requests/s | 90 | mosec: 30 | 3.1 |" in table
    assert "BentoML" not in table  # not measured


def test_a_server_that_is_ended_leaves_no_process_behind() -> None:
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    front = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    process = subprocess.Popen([sys.executable, "-c", front], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as words:
        assert words.readline() == b"ready\n"
        servers._end(process)
        assert words.read() == b""  # the worker, which held it open, is gone


@subcases("name", PARTS)
def test_a_part_says_how_many_steps_it_has(name: str) -> None:
    part = PARTS[name]
    assert part.name == name
    assert part.steps(3) >= part.steps(1) > 0


def test_the_requests_that_memory_is_measured_by_are_all_different_and_as_many_as_given() -> None:
    numbers = [number for _, some in text_memory.shared(5_000, 5_000) for number in some]
    assert (
        sorted(numbers) == list(range(5_000, 10_000)) and len({text_memory.text(number) for number in numbers}) == 5_000
    )
    assert sum(share for share, _ in text_memory.SHARES.values()) == 100


def test_texts_are_of_every_length_wherever_a_load_stops() -> None:
    found = texts.sample(64)
    shortest = set(sorted(found, key=len)[:8])
    assert (
        len(set(found)) == 64
        and [len(shortest & set(found[place : place + 8])) for place in range(0, 64, 8)] == [1] * 8
    )


def test_ratios_are_those_of_rounds_that_ran_side_by_side() -> None:
    assert ratio([10.0, 40.0, 90.0], [10.0, 20.0, 30.0]) == 2.0
    assert rotated([1, 2, 3], 4) == [2, 3, 1]
    assert spread([3.0, 1.0, 2.0], short) == "2 (1 to 3)"


def clock_of_looks(step: float) -> Any:
    """Return what has a clock on which each look takes `step` seconds, however long a busy machine takes."""
    looks = itertools.count()
    return SimpleNamespace(perf_counter=lambda: step * next(looks))


async def answer_by_turns(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """200 to the first request of a connection, in two pieces; 429 to the second; to the third no answer but the end."""
    for status in (b"200 OK", b"429 Too Many Requests"):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        for piece in (b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n9", b"9"):
            writer.write(piece)
            await writer.drain()
    await reader.readuntil(b"\r\n\r\n")


async def test_the_open_loop_counts_every_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "time", clock_of_looks(0.0005))
    handlers: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer_by_turns(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client has closed
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(handle(reader, writer)))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        loop = OpenLoop("127.0.0.1", server.sockets[0].getsockname()[1], "/infer/square", b"3")
        seen = await loop.run(rate=2000, seconds=0.1, connections=3)
        loop.close()
        await asyncio.gather(*handlers)
    assert seen["unanswered"] == 0
    assert set(seen["codes"]) == {"200", "429", "broken"} | (set(seen["codes"]) & {"unsent"})
    answered = sum(number for code, number in seen["codes"].items() if code != "unsent")
    assert answered == seen["sent"] > 3


def test_padding_by_length_and_by_arrival() -> None:
    lengths = [3 + number**2 % 197 for number in range(500)]
    by_arrival, by_length = (simulate(lengths, 256, way, padding.PRICE, 1.0) for way in padding.ALL)
    assert by_length.waste < 0.1 < 0.4 < by_arrival.waste


def test_bulk_work_adds_little_to_interactive_texts_and_gets_the_idle_time() -> None:
    whole = classes.traffic()
    texts = classes.Traffic(whole.times[:1500], whole.tokens[:1500])
    job = [200.0] * 3000
    alone = classes.by_weir(texts, ())
    for bulk_workers, most in ((1, 0.0), (0, classes.BULK_DELAY)):  # over the whole trace that is less than 5 %
        beside = classes.by_weir(texts, job, bulk_workers=bulk_workers)
        until = min(beside.done[-1], texts.times[-1])
        there = texts.times <= until
        p99, least = (np.quantile(seen.responses[there], 0.99) for seen in (beside, alone))
        assert least <= p99 <= least + most + 1e-9
        assert (p99 > least) == (bulk_workers == 0)
        idle = until - (classes.FIXED + classes.PER_TOKEN * texts.tokens[there]).sum()
        assert (beside.done <= until).sum() * 200.0 * classes.PER_TOKEN >= 0.8 * idle
    for rule in (classes.first_come, classes.like_infinity):
        worse = classes.by_rule(texts, job, rule)
        assert np.isfinite(worse.responses).all()
        assert len(worse.done) == len(job)
        assert np.quantile(worse.responses[there], 0.99) > 2 * p99


def test_vectors_are_compared_by_their_cosines_and_by_how_they_rank() -> None:
    angles = np.array([0.0, 0.1, 0.3, 0.7])
    exact = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert compare(exact, exact) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    turned = compare(exact[[0, 1, 3, 2]], exact)  # the last two have each other's place
    assert turned.mean == pytest.approx((1.0 + np.cos(0.4)) / 2)
    assert turned.least == pytest.approx(np.cos(0.4))
    assert turned.ranked < 1.0 and turned.nearest == 0.5
    assert len(turned.shown()) == len(COLUMNS)


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
