"""The harness of the comparisons beyond the paper: intervals, what is shown, and the page. The figures are no tests."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import numpy as np
import pytest
from benchmarks.parts import policy_edges
from benchmarks.policies import bursts, edges, harness
from benchmarks.policies.__main__ import COMPARISONS
from benchmarks.policies.bursts import ALLOWED, arrivals, beside_greedy, recorded, traffics
from benchmarks.policies.clairvoyant import by_row, clairvoyant
from benchmarks.policies.edges import Case
from benchmarks.policies.foreseen import beside_the_optimum
from benchmarks.policies.harness import (
    Compared,
    Effort,
    best_limit,
    best_size_or_delay,
    estimate,
    keep,
    known,
    marks,
    play_all,
    real,
    response,
    ruled,
    saved,
    show,
    tuned_limit,
    write_page,
)
from tests.policy.event_loop import needs_compiler
from tests.policy.random_models import SHAPES, drawn

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import GOOGLENET_P4, Floats, Profile
from weir.policy.solve.bank import solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import limit_table
from weir.simulation.arrivals import Poisson
from weir.simulation.banks import make_bank
from weir.simulation.rounds import Rule
from weir.simulation.simulator import run


def test_every_player_meets_the_same_lines() -> None:
    steps: list[str] = []
    process = Poisson(0.5 * GOOGLENET_P4.max_rate)
    players = {
        "batcher": real(GOOGLENET_P4, "control-limit:8"),
        "short cut": ruled(GOOGLENET_P4, Rule(limit_table(8, 32).tolist())),
        "best": tuned_limit(GOOGLENET_P4, Prices(1.0, 0.0)),
        "none can": tuned_limit(GOOGLENET_P4, Prices(), objective=LatencySLO(0.002)),
    }
    seen = play_all(process, players, Effort(2, 3_000, steps.append))
    assert len(steps) == 8
    for one, other in zip(known(seen["batcher"]), known(seen["short cut"]), strict=True):
        assert response(one) == pytest.approx(response(other), rel=0.01)
    spared = saved(seen["best"], seen["batcher"], response)
    assert spared is not None and 0.0 < spared.value < 1.0
    assert saved(seen["none can"], seen["batcher"], response) is None and show(None) == "–"


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.value == 2.0 and found.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert show(found, 1) == "2.0 ± 2.5"
    assert estimate([1.0]).high == inf


def test_the_page_gets_the_tables_between_their_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(harness, "PAGE", tmp_path / "page.md")
    keep("rates", Compared(["workers"], [["2"]]), {"lines": "seeds 1 to 3"})
    write_page()  # there is none yet
    begin, end = marks("rates")
    (tmp_path / "page.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_page()
    text = (tmp_path / "page.md").read_text()
    assert "| workers |\n| --- |\n| 2 |" in text and "seeds 1 to 3" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_the_page_shows_chosen_columns() -> None:
    for name, stored in harness.stored_results().items():
        columns, rows = harness.shown_on_page(name, stored)
        assert rows and all(len(row) == len(columns) for row in rows)
    columns, rows = harness.shown_on_page("promise", {"columns": [], "rows": [list("0123456789")]})
    assert columns[0] == "load" and rows == [list("01359")]


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_says_how_many_steps_it_has(name: str) -> None:
    assert COMPARISONS[name].name == name and COMPARISONS[name].steps(2) > 0


@needs_compiler
def test_the_clairvoyant_optimum_is_the_best_of_all_partitions() -> None:
    rng = np.random.default_rng(3)
    for number in range(40):
        largest, joule = int(rng.integers(1, 5)), float(rng.uniform(0.0, 5.0))
        times, energies = (np.cumsum(rng.uniform(0.2, 3.0, largest)) for _ in range(2))
        profile = Profile(times, energies, np.zeros(largest), 0.5)
        coming = 3.0 + np.cumsum(rng.exponential(0.002 if number % 2 else 0.0005, 9))
        every = [by_row(profile, coming, np.array(sizes), joule).mean() for sizes in partitions(9, largest)]
        assert clairvoyant(profile, coming, joule).mean() == pytest.approx(min(every), rel=1e-9)


def partitions(rows: int, largest: int) -> Iterator[list[int]]:
    """Yield every way to divide `rows` into batches, in order."""
    if not rows:
        yield []
    for size in range(1, min(rows, largest) + 1):
        yield from ([size, *rest] for rest in partitions(rows - size, largest))


@needs_compiler
def test_no_policy_costs_less_than_the_clairvoyant_optimum_and_costs_are_counted_alike() -> None:
    """Also of the batches that greedy makes: by row they cost what the real batcher says."""
    rate = 0.8 * GOOGLENET_P4.max_rate
    coming = recorded("code", rate).times(np.random.default_rng(1), 2_000)
    least, seen = beside_the_optimum(coming, rate, 0.3)
    assert least > 0.0 and all(each.value > 0.0 for each in seen.values())
    sizes = run(GOOGLENET_P4, "greedy", coming).batches.rows
    alone = by_row(GOOGLENET_P4, coming, np.asarray(sizes), 0.3 * rate / 1000.0)
    assert bursts.costs(GOOGLENET_P4, "greedy", coming, rate, 0.3).mean() == pytest.approx(alone.mean(), rel=0.01)


@pytest.mark.parametrize(("name", "requests"), [("conv", 19_366), ("code", 8_819)])
def test_the_recorded_arrivals_are_scaled_to_a_rate(name: str, requests: int) -> None:
    trace = recorded(name, 250.0)
    assert trace.length == requests
    assert trace.rate == pytest.approx(250.0)


# Where solved policies cost more than greedy before they kept an account, in MMPP, on/off and recorded traffic: up to 5 %.
@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("MMPP, load 0.1: 20 times, every 20 s", 1.0),
        ("MMPP, load 0.1: 20 times, every 0.02 s", 1.0),
        ("MMPP, load 0.3: 5 times, every 0.2 s", 0.0),
        ("on/off, load 0.1: 0.1 s on, 1 s off", 10.0),
        ("on/off, load 0.1: 0.3 s on, 1 s off", 1.0),
        ("on/off, load 0.5: 0.05 s on, 0.05 s off", 0.0),
        ("Azure code, load 0.3", 1.0),
    ],
)
def test_no_policy_costs_more_than_greedy_on_traffic_that_no_table_is_for(name: str, weight: float) -> None:
    traffic = next(each for each in traffics() if each.name == name)
    rate = traffic.load * GOOGLENET_P4.max_rate
    seen = beside_greedy(arrivals(traffic, rate, traffic.requests), rate, weight)
    assert max(seen["solved"].value, seen["auto"].value) < ALLOWED


def test_random_models_take_as_long_as_each_other_and_meet_all_kinds_of_traffic() -> None:
    cases = [bursts.case(number) for number in range(60)]
    assert {each.kind for each in cases} == {"MMPP", "on/off", "diurnal"}
    assert {each.model.shape for each in cases} == set(SHAPES)
    for each in cases:
        profile = each.model.profile
        assert profile.service_time_ms[-1] == pytest.approx(bursts.LARGEST_MS)
        assert 2 <= profile.max_batch_size <= 64 and 0.1 <= each.rate / profile.max_rate <= 0.9
        full = profile.energy_mj[-1] / profile.service_time_ms[-1]  # watts
        worth = each.model.prices.energy_weight * full / profile.service_time_ms[-1]
        assert 0.9e-3 < worth < 1.1e3  # six decades, as before the times were scaled
    assert bursts.case(7).about == cases[7].about


def test_what_surely_costs_more_is_counted_apart_from_what_seems_to() -> None:
    seen = [
        bursts.Found(0, [1.0] * 4, [0.7, 0.7, 0.7, 0.71], [-1.0] * 4),
        bursts.Found(1, [1.0] * 4, [-3.0, 4.3, 0.0, 1.0], [-1.0] * 4),
    ]
    made = bursts.table_of(seen)
    rows = {(row[0], row[1]): row[2:] for row in made.rows}
    assert rows["all", "solved"][0] == "2" and rows["all", "solved"][3:] == ["2", "1"]
    assert rows["all", "auto"][1] == "-1.00 %" and rows["all", "auto"][3:] == ["0", "0"]
    assert made.about["models"].startswith("2 ")
    assert rows[bursts.case(0).about, "solved"][2] == "+0.70 % (+0.69 to +0.72)"


# Cases between rates and at edges.


def test_cases_are_found_by_kind_and_number_and_kinds_go_on_by_what_they_depend_on() -> None:
    kinds = {kind.name: kind for kind in edges.KINDS}
    assert set(kinds) == {"between", "promises", "capacities", "several"} and edges.CASES == 819
    assert edges.found("between", 2) == list(edges.between(2))
    own, other = ({each.name for each in kinds[name].sources} for name in ("between", "several"))
    assert {"edges.py", "event_loop.c", "smdp.py", "rate.py"} <= own & other
    assert other - own >= {"replicas.py", "banks.py"} and "residency.py" not in other


def test_a_run_that_ends_early_has_tried_the_same_share_of_each_kind() -> None:
    order = list(policy_edges.evenly([(iter("aaaaaaaa"), 8), (iter("bb"), 2), (iter("cccc"), 4)]))
    assert Counter(order) == {"a": 8, "b": 2, "c": 4}
    assert Counter(order[:7]) == {"a": 4, "b": 1, "c": 2}


def test_only_what_is_beyond_with_its_interval_is_an_exception_and_all_of_them_are_kept() -> None:
    found = [
        Case(edges.BAND, "exact", 0.0030, 0.0), Case(edges.BAND, "near", 0.0024, 0.0), Case(edges.BAND, "unsure", 0.0030, 0.001),
        Case(edges.PROMISE, "broken", 0.5, 0.2), Case(edges.PROMISE, "maybe", 0.1, 0.2), Case(edges.PROMISE, "none", edges.EITHER, 0.0),
    ]  # fmt: skip
    made = policy_edges.result_of(found)
    assert [row[1:6] for row in made.rows] == [["3", "0.25 %", "2", "1", "1"], ["2", "as promised", "2", "1", "0"]]
    assert [met for _, _, met in made.goals] == ["no", "no"]
    assert [row[2] for row in made.tables[0].rows] == ["exact", "broken"]
    assert any("0.30 % ± 0.00. exact" in note for note in made.notes) and "At 1 further" in made.notes[-1]
    assert policy_edges.result_of([found[1]]).goals[0][2] == "yes"


@needs_compiler
def test_a_case_of_several_workers_is_about_the_entries_that_a_bank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "WORKER_COUNTS", (2,))
    found = {each.what: each for each in edges.several(2)}
    assert set(found) == {edges.LIMIT, edges.LIMIT_BETWEEN, edges.MEAN, edges.P99}
    about = found[edges.MEAN].about
    model = drawn(int(about[6 : about.index(")")]))
    workers, load = (int(about.split(" workers")[0].rpartition(" ")[2]), float(about.split("load ")[1].split(",")[0]))
    made = make_bank(model.profile, model.prices, workers=workers)
    limit = made.limits()[made.index_of(load * made.capacity)]
    assert about.endswith(f"limit {limit}")


def test_the_tables_of_a_case_are_those_of_its_bank() -> None:
    model = drawn(2)
    made, whole = edges.tables_of(model), solve_bank(model.profile, model.prices)
    assert np.array_equal(made.rates, whole.rates) and np.array_equal(made.tables, whole.tables)


@needs_compiler
@pytest.mark.parametrize(("kind", "number"), [(edges.between, 2), (edges.promises, 2), (edges.capacities, 5)])
def test_a_case_says_what_it_is_about(kind: Callable[[int], Iterator[Case]], number: int) -> None:
    made = list(kind(number))
    assert made and all(each.about.startswith("drawn(") and each.half >= 0.0 for each in made)


# The best hand-tuned rules are the best: nothing in their family does better on the same line.


P4 = GOOGLENET_P4


def poisson(load: float, count: int = 8_000) -> Floats:
    rate = load * P4.max_rate
    return np.asarray(np.cumsum(np.random.default_rng(3).exponential(1.0 / rate, count)), dtype=np.float64)


def test_finds_the_limit_that_is_best_by_the_exact_model() -> None:
    rate, prices = 0.5 * P4.max_rate, Prices(1.0, 10.0)
    exact = [evaluate(P4, rate, limit_table(limit, 32), prices).cost for limit in range(1, 33)]
    found = best_limit(P4, poisson(0.5), prices)
    assert found is not None
    limit = int(found.policy.removeprefix("control-limit:"))
    assert exact[limit - 1] <= min(exact) * 1.01


def test_the_price_of_latency_is_that_at_the_rate_of_the_line() -> None:
    """Stated at a tenth of the rate, a millisecond of the mean response time costs ten times as much there."""
    times = poisson(0.5, 4_000)
    rate = len(times) / float(times[-1])
    stated = best_limit(P4, times, Prices(1.0, 10.0, reference_rate=rate / 10.0))
    assert stated == best_limit(P4, times, Prices(10.0, 10.0)) != best_limit(P4, times, Prices(1.0, 10.0))


def test_a_timeout_that_never_ends_a_wait_is_a_limit() -> None:
    times, prices = poisson(0.6, 5_000), Prices(1.0, 1.0)
    limit = best_limit(P4, times, prices)
    delay = best_size_or_delay(P4, times, prices, sizes=range(1, 33), delays=[100.0])
    assert limit is not None and delay is not None
    assert delay.figures == limit.figures
    assert delay.policy == f"size-or-delay:size={limit.policy.removeprefix('control-limit:')},delay=100000ms"


def test_an_objective_rules_out_what_is_late_too_often() -> None:
    times, objective = poisson(0.5), LatencySLO(0.02, 0.01)
    delays = (0.01, 0.02)
    for found in (
        best_limit(P4, times, objective=objective),
        best_size_or_delay(P4, times, objective=objective, delays=delays),
    ):
        assert found is not None
        assert found.figures.late_share <= 0.01
    assert best_limit(P4, times, objective=LatencySLO(0.002, 0.01)) is None


def test_a_line_too_short_for_a_rule_is_no_line_for_it() -> None:
    found = best_limit(P4, np.linspace(0.01, 0.09, 9), Prices(0.0, 1.0))
    assert found is not None and int(found.policy.removeprefix("control-limit:")) <= 4


@pytest.mark.parametrize("times", [[], [1.0], [0.0, 0.0]])
def test_there_must_be_a_line(times: list[float]) -> None:
    with pytest.raises(SettingsError, match="arrivals: must be two or more"):
        best_limit(P4, np.array(times))
