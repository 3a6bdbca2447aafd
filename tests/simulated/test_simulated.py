"""The simulated server keeps its promises for the first seeds, replays to the byte, and finds a fault that is planted."""

import gc
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.rings import spread
from tests.simulated import shrinking
from tests.simulated.__main__ import replay
from tests.simulated.disk import SimulatedDisk
from tests.simulated.jobs import JobWorld, simulate_jobs
from tests.simulated.plans import Plan, draw_plan
from tests.simulated.shrinking import SEEDS, command, keep, narrowed, shrunk
from tests.simulated.themes import PLAIN
from tests.simulated.world import Result, simulate

from weir.errors import DeadlineExceeded, Overloaded
from weir.jobs.store import Disk


def loses_fronts(plan: Plan) -> bool:
    """Return whether fronts of this server are killed, and stopped, under load."""
    return {fault.kind for fault in plan.faults} > {"front_kill", "front_stop"} and len(plan.clients) > 10


@pytest.mark.parametrize("first", spread((0, 16, 8, 24), 2))
def test_a_server_keeps_its_promises_in_virtual_time(first: int) -> None:
    results = [simulate(draw_plan(seed)) for seed in range(first, first + 8)]
    assert [f"{command(result.plan)}: {result.fault}" for result in results if result.fault] == []
    assert sum(result.requests for result in results) > 1000


def test_seeds_that_have_failed_pass() -> None:
    """What a night has found stays in the tree."""
    for path in SEEDS.glob("*.json"):
        found = json.loads(path.read_text())
        assert replay(found["seed"], found["kept"], None) == 0, found


def test_a_seed_that_fails_becomes_a_file_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulated.shrinking.SEEDS", tmp_path)
    plan = narrowed(draw_plan(3), {"clients": [1], "faults": [], "turns": 2})
    keep(replace(simulate(plan), fault="none"))
    (found,) = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert (found["seed"], found["kept"]["turns"], found["fault"]) == (3, 2, "none")


# By whom: seeds that suit, and some of the ends that their requests have.
REPLAYED: dict[str, tuple[Callable[[Plan], bool], set[str]]] = {
    "http": (lambda plan: plan.theme.clients.get(PLAIN, 0) > 10, {"200", "504"}),
    "websockets": (
        lambda plan: "messages" in plan.theme.clients and "max_waiting_bytes" in plan.http,
        {"message 200", "message 404", "message 429"},
    ),
    "fronts that are killed": (loses_fronts, {"200"}),
    "grpc and damaged requests": (
        lambda plan: plan.theme.clients.get("calls", 0) > 5 and plan.wrong > 0.2 and not plan.fronts,
        {"call 0", "call 3", "call 8", "damaged 400", "damaged 101"},
    ),
    "texts": (
        lambda plan: plan.theme.clients.get("texts", 0) > 3 and plan.wrong > 0.0 and not plan.fronts,
        {"200", "400", "422", "500"},
    ),
}


@pytest.mark.parametrize("name", spread(REPLAYED, 2))
def test_a_seed_replays_to_the_byte(name: str) -> None:
    """Alone in a process, after other seeds in another one, and whatever the order of sets is."""
    suited, ends = REPLAYED[name]
    seed = next(seed for seed in count() if suited(draw_plan(seed)))
    for other in (5, 12):
        simulate(draw_plan(other))
    here = simulate(draw_plan(seed))
    assert here.fault == ""
    assert set(here.responses) >= ends
    for hashes in ("1", "2"):
        again = subprocess.run(
            [sys.executable, "-m", "tests.simulated", "--seed", str(seed)],
            env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"trace {here.trace}" in again.stdout
    assert here.trace != simulate(draw_plan(seed + 1)).trace


def kept_by_themselves(garbage: list[Any]) -> set[str]:
    """Return by which locals of their own tracebacks frequent errors were kept, and with them all that these functions had."""
    found = set[str]()
    for error in garbage:
        if isinstance(error, (Overloaded, DeadlineExceeded)):
            for frame, _ in traceback.walk_tb(error.__traceback__):
                mine = (name for name, value in frame.f_locals.items() if value is error)
                found.update(f"{frame.f_code.co_qualname}: {name}" for name in mine)
    return found


def test_an_error_does_not_keep_a_request_until_garbage_is_collected() -> None:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        ends = Counter[str]()
        for seed in range(12):
            ends += simulate(draw_plan(seed)).responses
        gc.collect()
        assert kept_by_themselves(gc.garbage) == set()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert min(ends["429"], ends["503"], ends["504"]) > 0


def test_a_planted_fault_is_found_and_replayed_by_the_command() -> None:
    search = f"{sys.executable} -m tests.simulated --mutant status-missing --seconds 60"
    found = subprocess.run(search, shell=True, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    fault, _, replayed = found.stdout.strip().splitlines()
    again = subprocess.run(replayed, shell=True, capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stdout + again.stderr
    assert fault.partition(": ")[2] in again.stdout


def test_shrinking_holds_on_to_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few clients, this simulation fails for another reason."""

    def simulated(plan: Plan) -> Result:
        late = len(plan.clients) < 3 or 7 not in plan.clients
        fault = f"at {len(plan.clients)}.5 s: n={plan.turns}: " + ("it is late" if late else "it has no end")
        return Result(plan, fault, "", 0, 0.0, Counter())

    monkeypatch.setattr(shrinking, "simulate", simulated)
    smallest = shrunk(replace(draw_plan(9), clients=list(range(12)), faults=[], turns=30))
    assert smallest.fault == "at 3.5 s: n=1: it has no end"


# Batch jobs keep their promises on a disk that fails, whatever befalls the server; what is not durable is missed.


@pytest.mark.parametrize("first", spread(range(0, 32, 8)))
def test_jobs_have_their_ends_on_a_disk_that_fails(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[bool] = []
    die = JobWorld.die

    def counted(self: JobWorld, *, power: bool = False) -> None:
        died.append(power)
        die(self, power=power)

    monkeypatch.setattr(JobWorld, "die", counted)
    assert [f"{seed}: {fault}" for seed in range(first, first + 8) if (fault := simulate_jobs(seed).fault)] == []
    assert died.count(True) > 0
    assert died.count(False) > 2


def test_a_seed_of_jobs_replays_to_the_byte() -> None:
    again = subprocess.run(
        [sys.executable, "-m", "tests.simulated", "--disk", "--seed", "16"],
        env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"trace {simulate_jobs(16).trace}" in again.stdout


def test_files_that_are_not_durable_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: SimulatedDisk, part: Path, path: Path) -> int:
        self.rename(part, path)
        return path.stat().st_size

    monkeypatch.setattr(Disk, "keep", kept)
    assert "a job is failed" in simulate_jobs(5).fault
