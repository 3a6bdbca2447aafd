import asyncio
import logging
from typing import Any

import pytest
from tests.workers.runs import Heard

from weir.errors import Cancelled, ModelError, SettingsError
from weir.messages import JSON, OBJECT, Batch, EventKind
from weir.model import Model
from weir.workers.local.inline import InlineExecutor
from weir.workers.settings import WorkerSettings


class Square(Model):
    ends: BaseException | None = None

    def predict(self, batch: list[Any]) -> list[Any]:
        if 13 in batch:
            raise self.ends or ValueError("unlucky")
        return [x * x for x in batch]


def make(model: type[Model] = Square, **settings: Any) -> InlineExecutor:
    return InlineExecutor(model, {}, WorkerSettings(executor="inline", **settings), name="square", max_batch_size=64)


def test_a_batch_runs_in_a_later_turn_of_the_loop() -> None:
    async def main() -> None:
        executor, heard = make(workers=3), Heard()
        await executor.start(heard)
        assert await heard.next("ready") == 1
        executor.run(0, Batch(1, [b"2", b"13"], JSON, JSON))
        assert heard.log.empty()
        assert executor.states()[0].in_flight == 1
        events = await heard.next("events")
        assert events.outputs[0] == b"4"
        assert events.kinds == [EventKind.DONE, EventKind.ERROR]
        assert [state.in_flight for state in executor.states()] == [0]
        await executor.stop()
        await executor.stop()
        assert executor.states()[0].state == "stopped"

    asyncio.run(main())


def test_entries_cancelled_before_it_began_are_left_out() -> None:
    async def main() -> None:
        executor, heard = make(), Heard()
        await executor.start(heard)
        await heard.next("ready")
        executor.run(0, Batch(1, [13, 2], OBJECT, OBJECT))
        executor.cancel(0, 1, [0])
        executor.cancel(0, 99, [0])
        outputs = (await heard.next("events")).outputs
        assert isinstance(outputs[0], Cancelled)
        assert outputs[1] == 4
        await executor.stop()

    asyncio.run(main())


def test_a_batch_that_has_not_begun_when_it_stops_is_dropped() -> None:
    async def main() -> None:
        executor, heard = make(), Heard()
        await executor.start(heard)
        await heard.next("ready")
        executor.run(0, Batch(1, [2], OBJECT, OBJECT))
        await executor.stop()
        await asyncio.sleep(0)
        assert heard.log.empty()

    asyncio.run(main())


@pytest.mark.parametrize("step", ["__init__", "load"])
@pytest.mark.parametrize("error", [OSError("no weights"), SystemExit(3)])
def test_a_start_that_fails_is_a_model_error(step: str, error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    async def main() -> None:
        executor = make(type("Broken", (Square,), {step: fail}))
        with pytest.raises(ModelError, match="worker 0 of 'square' did not load: it raised") as caught:
            await executor.start(Heard())
        assert caught.value.original_type == type(error).__name__
        assert executor.states()[0].state == "failed"
        await executor.stop()

    asyncio.run(main())


def test_a_system_exit_is_the_entrys_error() -> None:
    async def main() -> None:
        executor, heard = make(type("Exiting", (Square,), {"ends": SystemExit(3)})), Heard()
        await executor.start(heard)
        await heard.next("ready")
        executor.run(0, Batch(1, [1, 13], OBJECT, OBJECT))
        outputs = (await heard.next("events")).outputs
        assert outputs[0] == 1
        assert outputs[1].original_type == "SystemExit"
        await executor.stop()

    asyncio.run(main())


def test_an_interrupt_ends_the_batch_and_goes_on_to_the_program() -> None:
    loop = asyncio.new_event_loop()
    executor, heard = make(type("Interrupted", (Square,), {"ends": KeyboardInterrupt()})), Heard()
    loop.run_until_complete(executor.start(heard))
    executor.run(0, Batch(1, [1, 13], OBJECT, OBJECT))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(heard.next("ready"))
    events = loop.run_until_complete(heard.next("events"))
    assert [output.original_type for output in events.outputs] == ["KeyboardInterrupt"] * 2
    loop.run_until_complete(executor.stop())
    loop.close()


@pytest.mark.parametrize("setting", [{"env": [{"A": "1"}]}, {"cpu_affinity": [[0]]}, {"threads": 2}])
def test_settings_that_need_a_process_are_refused(setting: dict[str, Any]) -> None:
    async def main() -> None:
        with pytest.raises(SettingsError, match=f"{next(iter(setting))}=.*needs worker processes"):
            await make(**setting).start(Heard())

    asyncio.run(main())


def test_an_unload_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Clinging(Square):
        def unload(self) -> None:
            raise OSError("will not go")

    async def main() -> None:
        executor = make(Clinging)
        await executor.start(Heard())
        await executor.stop()

    with caplog.at_level(logging.ERROR, "weir"):
        asyncio.run(main())
    assert "worker 0 of 'square': unload raised" in caplog.text


def test_there_is_no_shared_memory() -> None:
    executor = make()
    assert executor.reserve(1 << 20) is None
    assert executor.gauges() == {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": 0}
