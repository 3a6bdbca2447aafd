import asyncio
from typing import Any

import pytest

import weir
from weir.errors import Cancelled, DeadlineExceeded, ModelCrashed, Overloaded, WeirError, WorkerLost
from weir.frontends.http.pages import Held, code_of, make_exposition
from weir.protocols.account import Account
from weir.protocols.settings import HttpSettings
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor


class Square(weir.Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


@pytest.mark.parametrize(
    ("kind", "code"),
    [(None, "200"), (Overloaded, "429"), (DeadlineExceeded, "408"), (WorkerLost, "503"), (ModelCrashed, "500"),
     (Cancelled, "499")],
)  # fmt: skip
def test_the_code_at_the_http_door_is_http_s(kind: type[WeirError] | None, code: str) -> None:
    assert code_of("http", kind) == code


def test_in_process_the_code_is_the_error() -> None:
    assert code_of("python", None) == "ok"
    assert code_of("python", Overloaded) == "Overloaded"


def test_levels_are_those_of_the_running_models() -> None:
    async def shown() -> str:
        metrics, executor = Metrics(), FakeExecutor()
        service = weir.Service(Square, executor=executor, observers=[metrics], max_batch_size=2)
        exposition = make_exposition(metrics, weir.Registry([service]))
        await service.start()
        calls = [service.infer(n) for n in range(5)]
        await asyncio.sleep(0)
        text = exposition.render()[0].decode()
        for call in calls:
            call.cancel()
        await service.stop(0.0)
        return text

    text = asyncio.run(shown())
    assert 'weir_waiting_rows{model="square"} 3.0' in text
    assert 'weir_waiting_requests{model="square"} 3.0' in text
    assert 'weir_running_batches{model="square"} 1.0' in text
    assert 'weir_workers{model="square",state="ready"} 1.0' in text
    assert 'weir_worker_restarts_total{model="square"} 0.0' in text


def test_versions_of_a_model_are_told_apart() -> None:
    metrics = Metrics()
    services = [weir.Service(Square, name="sq", version=version, executor=FakeExecutor()) for version in ("1", "2")]
    metrics.transferred(services[0].label, "http", 3, 4)
    text = make_exposition(metrics, weir.Registry(services)).render()[0].decode()
    assert 'weir_received_bytes_total{door="http",model="sq",version="1"} 3.0' in text
    assert [f'weir_waiting_rows{{model="sq",version="{version}"}} 0.0' in text for version in ("1", "2", "3")] == [
        True, True, False,
    ]  # fmt: skip


def test_what_clients_hold_is_shown() -> None:
    account = Account(HttpSettings(max_waiting_bytes=100, max_connections=7))
    account.take(60)
    with pytest.raises(Overloaded):
        account.take(60)
    account.counters.append(lambda: 3)
    assert {family.name: family.samples[0].value for family in Held(account).collect()} == {
        "weir_held_bytes": 60, "weir_max_held_bytes": 100, "weir_connections": 3, "weir_max_connections": 7,
        "weir_held_refusals": 1,
    }  # fmt: skip
