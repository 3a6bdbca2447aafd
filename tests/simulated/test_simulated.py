"""The simulated server keeps its promises for the first seeds, replays to the byte, and finds a fault that is planted."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.rings import spread
from tests.simulated import shrinking, world
from tests.simulated.__main__ import replay
from tests.simulated.arenas import ArenaPlan, SimulatedArena
from tests.simulated.asking import Ask, fault_of
from tests.simulated.channels import FIRST, FUZZ
from tests.simulated.clients import Client
from tests.simulated.loop import SimulatedLoop, Stuck
from tests.simulated.plans import Plan, draw_plan
from tests.simulated.relaying import OnwardCall, SimulatedChannel
from tests.simulated.shrinking import command, narrowed, promise_of, shrunk
from tests.simulated.texts import SimulatedTexts
from tests.simulated.themes import CHANNELS, PLAIN, STYLES
from tests.simulated.world import Result, simulate

from weir.frontends.grpc.call import IncomingCall
from weir.fronts.dispatcher import ConnectedFront
from weir.fronts.messages import FromFront
from weir.fronts.remote import RemoteHandle
from weir.serving.service import Service
from weir.text_server.encoder import Encoder
from weir.text_server.texts import Encoded

SEEDS = 32


def plans(*, suited: Callable[[Plan], bool]) -> Iterator[Plan]:
    """Return the plans that are suited, from the first seed on."""
    return filter(suited, map(draw_plan, count()))


def loses_fronts(plan: Plan) -> bool:
    """Return whether fronts of this server are killed, and stopped, under load."""
    return {fault.kind for fault in plan.faults} > {"front_kill", "front_stop"} and len(plan.clients) > 10


def passes_through_fronts(plan: Plan) -> bool:
    """Return whether fronts serve gRPC and texts."""
    return plan.fronts > 1 and min(plan.theme.clients.get(each, 0) for each in ("calls", "texts")) > 1


def calls_fail(plan: Plan) -> bool:
    """Return whether gRPC serves many calls of which some fail, and no fronts do."""
    return plan.theme.clients.get("calls", 0) > 5 and plan.wrong > 0.2 and not plan.fronts


def asks_for_vectors(plan: Plan) -> bool:
    """Return whether most clients ask for vectors of texts, of which some fail, and no fronts do."""
    return plan.theme.clients.get("texts", 0) > 3 and plan.wrong > 0.0 and not plan.fronts


@pytest.mark.parametrize("first", spread(range(0, SEEDS, 8), 2))
def test_a_server_keeps_its_promises_in_virtual_time(first: int) -> None:
    results = [simulate(draw_plan(seed)) for seed in range(first, first + 8)]
    assert [f"{command(result.plan)}: {result.fault}" for result in results if result.fault] == []
    assert sum(result.requests for result in results) > 1000


def test_seeds_that_have_failed_pass() -> None:
    """What a night has found stays in the tree; see seeds.txt."""
    for line in Path(__file__).with_name("seeds.txt").read_text().splitlines():
        seed, _, rest = line.partition("#")[0].strip().partition(" ")
        if seed:
            assert replay(int(seed), json.loads(rest) if rest else None, None) == 0, line


@pytest.mark.parametrize(
    "suited",
    spread(
        [
            lambda plan: plan.theme.clients.get(PLAIN, 0) > 10,
            lambda plan: "messages" in plan.theme.clients and "max_waiting_bytes" in plan.http,
            loses_fronts,
            calls_fail,
            asks_for_vectors,
        ],
        2,
    ),
    ids=["http", "websockets with little memory", "fronts that are killed", "gRPC", "texts"],
)
def test_a_seed_replays_to_the_byte(suited: Callable[[Plan], bool]) -> None:
    """Alone in a process, after other seeds in another one, and whatever the order of sets is."""
    seed = next(plans(suited=suited)).seed
    for other in (5, 12):
        simulate(draw_plan(other))
    here = simulate(draw_plan(seed))
    for hashes in ("1", "2"):
        again = subprocess.run(
            [sys.executable, "-m", "tests.simulated", "--seed", str(seed)],
            env=os.environ | {"PYTHONHASHSEED": hashes}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"trace {here.trace}" in again.stdout
    assert here.trace != simulate(draw_plan(seed + 1)).trace


def test_fronts_are_stopped_and_killed_and_their_requests_travel_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    received = ConnectedFront._received

    def counted(self: ConnectedFront, messages: list[FromFront]) -> None:
        seen.update(type(message).__name__ for message in messages)
        received(self, messages)

    monkeypatch.setattr(ConnectedFront, "_received", counted)
    some = list(islice(plans(suited=loses_fronts), 3))
    assert [simulate(plan).fault for plan in some] == [""] * 3
    assert min(seen[each] for each in ("Submit", "CallerLeft", "Refused", "Alive")) > 0
    assert seen["FrontListens"] > sum(plan.fronts for plan in some)


def test_calls_and_texts_pass_through_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    onward, reported = SimulatedChannel.stream_stream, SimulatedTexts.reported

    def passed_on(self: SimulatedChannel, path: str) -> Callable[..., OnwardCall]:
        seen[path.rpartition("/")[2]] += 1
        return onward(self, path)

    def counted(self: SimulatedTexts, data: bytes) -> None:
        seen["counts"] += 1
        reported(self, data)

    monkeypatch.setattr(SimulatedChannel, "stream_stream", passed_on)
    monkeypatch.setattr(SimulatedTexts, "reported", counted)
    some = islice(plans(suited=passes_through_fronts), 3)
    assert [simulate(plan).fault for plan in some] == [""] * 3
    assert set(seen) >= {"ModelInfer", "ModelStreamInfer", "ServerReady", "counts"}


def test_damaged_requests_are_refused_and_leave_nothing() -> None:
    plan = replace(next(plans(suited=lambda plan: set(plan.theme.clients) == {PLAIN, "fuzz"})), turns=30)
    plan.clients = [*range(2), *range(FUZZ * FIRST, FUZZ * FIRST + 12)]
    result = simulate(plan)
    assert result.fault == ""
    assert {400, 404, 200, 101} <= {int(each[8:]) for each in result.responses if each.startswith("damaged ")}
    assert sum(result.responses.values()) > 100


def test_calls_of_grpc_get_their_own_answers_or_an_error_of_the_table() -> None:
    results = [simulate(plan) for plan in islice(plans(suited=calls_fail), 10)]
    assert [result.fault for result in results if result.fault] == []
    seen = sum((result.responses for result in results), Counter[str]())
    assert {f"call {code}" for code in (0, 1, 3, 4, 5, 8, 12, 13, 14)} <= set(seen)
    assert seen["call 0"] > 100


def test_texts_get_their_own_vectors_in_order() -> None:
    results = [simulate(plan) for plan in islice(plans(suited=asks_for_vectors), 10)]
    assert [result.fault for result in results if result.fault] == []
    seen = sum((result.responses for result in results), Counter[str]())
    assert {"200", "400", "404", "422", "424", "500", "504"} <= set(seen)
    assert seen["200"] > 100


def test_vectors_that_are_not_in_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "_encoded", reversed_vectors(Encoder._encoded))
    some = islice(plans(suited=asks_for_vectors), 10)
    assert any("the vectors are not its own" in simulate(plan).fault for plan in some)


def reversed_vectors(encoded: Callable[..., Encoded]) -> Callable[..., Encoded]:
    """Return a function that returns the vectors of `encoded` in the wrong order."""

    def reversing(*arguments: Any) -> Encoded:
        found = encoded(*arguments)
        return found._replace(vectors=found.vectors[::-1])

    return reversing


def test_a_call_that_goes_on_after_its_caller_has_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncomingCall, "_leave", IncomingCall._close)
    some = islice(plans(suited=calls_fail), 10)
    assert any("after its caller had left" in simulate(plan).fault for plan in some)


def test_a_fault_with_a_killed_front_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteHandle, "cancel", lambda *_: None)
    monkeypatch.setattr(Service, "cancel", lambda *_: None)
    some = islice(plans(suited=loses_fronts), 10)
    assert any("has ended, and its requests" in simulate(plan).fault for plan in some)


def test_a_planted_fault_is_found_and_replayed_by_the_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulated", "--mutant", "status-missing", "--seconds", "60"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    fault, _, replay = found.stdout.strip().splitlines()
    again = subprocess.run(replay, shell=True, capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stdout + again.stderr
    assert fault.partition(": ")[2] in again.stdout


def test_a_theme_leaves_most_things_out_and_sometimes_nothing() -> None:
    themes = [draw_plan(seed).theme for seed in range(200)]
    everything = [theme for theme in themes if theme.styles == STYLES]
    assert 10 < len(everything) < 60
    for name in {style for theme in themes for style in theme.styles}:
        assert 60 < sum(name in theme.styles for theme in themes) < 160
    for name in CHANNELS:
        assert sum(name in theme.clients for theme in themes) > 20


@pytest.mark.parametrize(("named", "fault"), [(False, ""), (True, "an error that no table has: ''")])
def test_an_error_has_the_form_of_a_protocol_only_if_the_server_can_know_it(named: bool, fault: str) -> None:
    ask = Ask(1, b"POST /v2/models/tensors/infer", kserve=True, rows=1, timeout=1.0, wanted="", named=named)
    found = fault_of(ask, 503, {}, b'{"error": {"type": "Draining"}}')
    assert fault in found if fault else not found


def test_a_plan_shrinks_to_the_client_that_fails() -> None:
    plan = next(plans(suited=lambda plan: plan.theme.clients.get(PLAIN, 0) > 10))
    small = narrowed(plan, {"clients": plan.clients[:1], "faults": [], "turns": 3})
    assert simulate(small).requests < simulate(plan).requests
    assert shrunk(small).fault == ""  # what does not fail has nothing to find


def test_shrinking_holds_on_to_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few clients, this simulation fails for another reason."""

    def simulated(plan: Plan) -> Result:
        late = len(plan.clients) < 3 or 7 not in plan.clients
        fault = f"at {len(plan.clients)}.5 s: n={plan.turns}: " + ("it is late" if late else "it has no end")
        return Result(plan, fault, "", 0, 0.0, Counter())

    monkeypatch.setattr(shrinking, "simulate", simulated)
    smallest = shrunk(replace(draw_plan(9), clients=list(range(12)), faults=[], turns=30))
    assert smallest.fault == "at 3.5 s: n=1: it has no end"


def test_faults_of_one_promise_are_told_from_others() -> None:
    one = "at 1.5 s: n=100: status 503 with an error that no table has: '': b'{}'"
    other = "at 20.000000 s: n=7: status 503 with an error that no table has: 'x': b'[1]'"
    assert promise_of(one) == promise_of(other) != promise_of("at 1.5 s: n=100: it got InvalidRequest")


def test_a_search_runs_in_several_processes() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulated", "--jobs", "2", "--seconds", "0.1", "--first", "4"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(line.partition(":")[0][-6:] for line in found.stdout.splitlines()) == ["from 4", "from 5"]


def test_a_simulation_whose_time_stands_fails() -> None:
    loop = SimulatedLoop()

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    try:
        with pytest.raises(Stuck, match="time stands"):
            loop.run_forever()
    finally:
        loop.close()


def test_a_simulation_whose_clients_wait_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may excuse a request whose front was stopped, and wait for it: not for ever."""
    monkeypatch.setattr(Client, "begin", lambda _: None)
    plan = next(plans(suited=lambda plan: set(plan.theme.clients) == {PLAIN} and not plan.quiet))
    assert "clients wait without end" in simulate(plan).fault


def test_a_simulation_that_computes_for_ever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_ever(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(world, "LONGEST", 0.3)
    monkeypatch.setattr(world.SimulatedServer, "sweep", for_ever)
    assert "it has taken 0.3 s of CPU time, at <frame" in simulate(draw_plan(0)).fault


class KeepsAPlace(world.World):
    """A place in shared memory is not given back."""

    def _check_rest(self) -> None:
        executor = self._executors[0]
        assert executor.arenas is not None
        assert executor.arenas.requests.reserve(1) is not None
        super()._check_rest()


def test_a_place_that_is_not_given_back_is_found() -> None:
    plan = next(plans(suited=lambda plan: plan.arenas is not None and plan.arenas.refused == 0.0 and not plan.quiet))
    assert not simulate(plan).fault
    assert "Items: places in an arena': 1" in simulate(plan, KeepsAPlace).fault


def test_a_place_that_was_freed_has_other_bytes() -> None:
    arena = SimulatedArena(ArenaPlan(1000, 0.0, 0.0), Random(0))
    block = arena.reserve(2)
    assert block is not None
    block.view[:] = b"ab"
    block.release()
    assert bytes(block.view) == b"\xdd\xdd"
    arena.close()
