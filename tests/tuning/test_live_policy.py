"""Solved policies in running services: real workers, real solving processes."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.rings import spread
from tests.served import MODELS, serving
from tests.serving.models import Broken
from tests.tuning.banks import small_bank
from tests.waiting import until

import weir
from weir.errors import Conflict, Draining, ModelError, ModelNotReady, SettingsError
from weir.policy.cost import GOOGLENET_P4, Prices
from weir.policy.online.adaptive import SolvedPolicy
from weir.testing import FakeExecutor

# Solves take seconds of processor time, and minutes where other work takes both processors.
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("quick_solves")]


class Timed(weir.Model):
    """Takes as long as banks.PROFILE says, times `factor`; while the file `gate` is there, it does not load."""

    examples = (1, 2)
    max_batch_size = 4
    factor = 1.0

    def __init__(self, gate: str = "/nowhere") -> None:
        self.gate = Path(gate)

    def load(self) -> None:
        while self.gate.exists():
            time.sleep(0.01)

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(type(self).factor * (0.001 * len(batch) + 0.004))
        return [x * x for x in batch]


class Quick(weir.Model):
    """Has no examples."""

    max_batch_size = 4

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.0005 * (1 + len(batch)))  # times that hardly vary are solved for in a moment
        return batch


def bank_of(service: weir.Service) -> Any:
    policy: Any = service.policy
    return policy.bank


def workers_of(service: weir.Service) -> int:
    return bank_of(service).workers if bank_of(service) else 0


def solved(service: weir.Service, reason: str) -> int:
    count: int = service.explain_policy()["solved"]["reasons"].get(reason, 0)
    return count


async def test_a_model_that_becomes_slower_has_its_tables_solved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with weir.Service(Timed, policy=SolvedPolicy(small_bank()), executor="thread") as service:
        monkeypatch.setattr(Timed, "factor", 3.0)
        while not solved(service, "drift"):
            await service.infer(2)
        bank = bank_of(service)
        assert bank.profile.service_time_ms[0] > 10.0  # it was 5 ms
        assert service.explain_policy()["drift"]["factor"] > 2.0


async def test_a_stop_leaves_no_solving_process(nothing_is_left: None) -> None:
    async with weir.Service(Timed, policy=SolvedPolicy(small_bank())) as service:
        change = asyncio.create_task(service.set_prices(latency_objective="p99=30ms"))
        await until(lambda: service.explain_policy()["solved"]["solving"])
        await service.stop()
        with pytest.raises(Draining, match="was stopped before the new tables were there"):
            await change


async def test_a_service_that_is_started_again_has_its_prices_and_tables() -> None:
    service = weir.Service(Timed, policy=SolvedPolicy(small_bank()), executor="thread")
    with pytest.raises(ModelNotReady):
        await service.set_prices(energy_weight=3.0)
    async with service:
        await service.set_prices(energy_weight=3.0)
    async with service:
        assert service.explain_policy()["prices"]["energy_weight"] == 3.0
        assert (await service.set_prices(latency_weight=2.0))["solved"]["count"] == 2


def test_of_a_program_without_an_event_loop() -> None:
    with weir.BlockingService(Timed, policy="auto:seconds=0.6,energy_weight=1", executor="inline") as service:
        assert service.infer(3) == 9
        while service.explain_policy()["solved"]["reason"] != "start":
            assert service.infer(3) == 9
        assert service.set_prices(energy_weight=2.0)["prices"]["energy_weight"] == 2.0
        with pytest.raises(SettingsError):
            service.set_prices(energy_weight=-1.0)


# The policy `auto`.


@pytest.mark.parametrize("executor", spread(["process", "inline"]))
async def test_auto_has_measured_before_it_is_ready_and_solves_while_it_serves(executor: str) -> None:
    async with weir.Service(Timed, policy="auto:seconds=0.3", executor=executor) as service:
        explained = service.explain_policy()
        assert explained["profile"]["max_batch_size"] == 4
        assert explained["profile"]["service_time_ms"][0] > 4.0
        assert (explained["solved"]["count"], explained["learning"]) == (0, True)
        assert await service.infer_many(list(range(20))) == [x * x for x in range(20)]
        await until(lambda: solved(service, "start"))
        assert bank_of(service) is not None


async def test_auto_with_a_profile_measures_nothing(tmp_path: Path) -> None:
    path = tmp_path / "googlenet.profile.toml"
    path.write_text(GOOGLENET_P4.to_toml())
    executor = FakeExecutor(lambda items: items)
    async with weir.Service(
        Quick, policy=f"auto:profile={path},energy_weight=1", executor=executor, max_batch_size=8
    ) as service:
        assert executor.batches == []
        await until(lambda: solved(service, "start"))
        bank = bank_of(service)
        assert bank.profile.max_batch_size == 8
        assert bank.prices == Prices(1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a profile made by `weir profile`|weir_profile=None"),
        (None, "nothing.toml: cannot be read"),
        (GOOGLENET_P4.up_to(3).to_toml(), "solved for batches of up to 3 rows, and max_batch_size=4"),
    ],
)
def test_auto_with_a_profile_that_cannot_be_used(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "nothing.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=says):
        weir.Service(Quick, policy=f"auto:profile={path}")


async def test_what_has_no_tables_and_no_prices() -> None:
    with pytest.raises(SettingsError, match="must have a bank; without one, use auto"):
        weir.Service(Quick, policy=SolvedPolicy())
    async with weir.Service(Quick, executor="inline") as service:
        with pytest.raises(Conflict, match="'greedy': only a solved policy has weights"):
            await service.set_prices(energy_weight=3.0)


async def test_auto_without_examples_is_greedy_and_learns(caplog: pytest.LogCaptureFixture) -> None:
    async with weir.Service(Quick, policy="auto", executor="inline") as service:
        assert "could not be measured, so its policy starts as greedy" in caplog.text
        assert bank_of(service) is None
        assert (await service.set_prices(energy_weight=1.0))["prices"]["energy_weight"] == 1.0
        while bank_of(service) is None:
            await service.infer(1)
            await service.infer_many([1, 2, 3, 4])
        bank = bank_of(service)
        assert (bank.profile.max_batch_size, bank.prices.energy_weight) == (4, 1.0)
        assert solved(service, "learned")


class Refusing(Quick):
    """Refuses its own examples."""

    examples = (1,)
    warmup_sizes = ()

    def predict(self, batch: list[Any]) -> list[Any]:
        raise ArithmeticError("not these")


class Deadly(Refusing):
    """Dies of its own examples."""

    def predict(self, batch: list[Any]) -> list[Any]:
        os._exit(3)


@pytest.mark.parametrize("model", [Refusing, Deadly])
async def test_auto_with_examples_that_fail_is_greedy(model: type[weir.Model]) -> None:
    async with weir.Service(model, policy="auto:seconds=0.2") as service:
        assert service.ready
        assert bank_of(service) is None
        assert service.explain_policy()["learning"] is True


async def test_auto_of_a_model_that_cannot_be_loaded_fails_as_it_would() -> None:
    service = weir.Service(Broken, policy="auto")
    with pytest.raises(ModelError, match=r"weights\.bin"):
        await service.start()


@pytest.mark.parametrize("way", ["stop", "cancel"])
async def test_a_start_can_be_ended_while_the_model_is_measured(way: str, nothing_is_left: None) -> None:
    service = weir.Service(Timed, policy="auto:seconds=60")
    start = asyncio.create_task(service.start())
    await until(lambda: service.state()["workers"] and service.state()["workers"][0]["in_flight"])
    if way == "stop":
        await service.stop(0.0)
        with pytest.raises(ModelNotReady, match="stopped before it was ready"):
            await start
    else:
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
    assert not service.ready


# Solved policies through the real command: `weir serve --policy auto` and `--policy FILE.npz`.


def test_auto_measures_serves_and_solves_and_a_drain_ends_a_solve() -> None:
    arguments = f"{MODELS}:Steady", "--name", "square", "--policy", "auto:seconds=0.6"
    with serving(*arguments, env={"COLUMNS": "200"}) as (served, client):
        assert "auto:seconds=0.6 (greedy, learning)" in " ".join(served.table.split())
        answers = client.post("/infer/square/batch", json=list(range(100))).json()
        assert [answer["output"] for answer in answers] == [x * x for x in range(100)]
        while not (explained := client.get("/models/square/policy").json())["solved"]["count"]:
            assert client.post("/infer/square", json=3).json() == 9
        assert explained["profile"]["max_batch_size"] == 8
        assert 'weir_policy_resolves_total{model="square",reason="start"} 1.0' in client.get("/metrics").text
        changed = client.put("/models/square/policy", json={"energy_weight": 2.0}).json()
        assert changed["prices"]["energy_weight"] == 2.0
        assert 'weir_policy_resolves_total{model="square",reason="prices"} 1.0' in client.get("/metrics").text
        codes = []

        def change() -> None:
            with httpx.Client(base_url=served.url, timeout=60) as other:
                codes.append(other.put("/models/square/policy", json={"latency_objective": "p99=30ms"}).status_code)

        thread = threading.Thread(target=change)
        thread.start()
        while not client.get("/models/square/policy").json()["solved"]["solving"]:
            assert thread.is_alive()
        served.signal(signal.SIGTERM)
        thread.join(60)
        assert (served.wait(), codes) == (0, [503])
