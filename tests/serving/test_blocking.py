import asyncio
import concurrent.futures
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.serving.kit import Square, squares

from weir import BlockingService, DeadlineExceeded, ModelError, ModelNotReady, Service
from weir.errors import Conflict, Draining, InvalidRequest, Overloaded
from weir.serving.blocking import Background
from weir.testing import FakeExecutor

SOURCE = str(Path(__file__).parents[2] / "src")

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def blocking(executor: FakeExecutor | None = None, **options: Any) -> BlockingService:
    return BlockingService(Square, executor=executor or FakeExecutor(squares), **options)


class Plus(Service):
    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return [x + 1 for x in batch]


async def test_it_works_while_another_loop_runs_in_the_thread() -> None:
    with BlockingService(Plus(Square, executor=FakeExecutor(squares))) as service:  # a service of one's own
        assert service.infer(2) == 9
        assert list(service.stream(range(5))) == squares(list(range(1, 6)))
        assert await asyncio.wrap_future(service.submit(3)) == 16
        service.start()  # nothing to do
        with pytest.raises(Conflict, match="already running"), service:
            pass


class Held(FakeExecutor):
    """Answers nothing, and tells the test when a batch has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def run(self, worker: int, batch: Any) -> None:
        super().run(worker, batch)
        self.came.set()


def test_all_of_a_service_without_a_loop() -> None:
    with blocking(max_batch_size=8, max_queue_size=16) as service:
        assert service.ready
        assert service.infer(3) == 9
        assert service.infer_many(range(100)) == squares(list(range(100)))
        assert list(service.stream(range(300))) == squares(list(range(300)))
        assert list(service.stream([2], return_inputs=True)) == [(2, 4)]
        futures = [service.submit(item) for item in range(100)]
        assert [future.result() for future in futures] == squares(list(range(100)))
        assert concurrent.futures.wait(futures).not_done == set()
        assert service.deep_health()["healthy"]
        assert service.state()["model"] == "square"
    assert service.not_ready_reason == "stopped"


def test_errors_come_as_they_are() -> None:
    def picky(batch: list[Any]) -> list[Any]:
        return [ModelError("odd") if x % 2 else x for x in batch]

    with blocking(FakeExecutor(picky)) as service:
        with pytest.raises(ModelError, match="odd"):
            service.infer(1)
        with pytest.raises(ModelError, match="odd"):
            service.infer_many([0, 1])
        with pytest.raises(ModelError, match="odd"):
            list(service.stream([0, 1]))
        assert isinstance(service.infer_many([0, 1], return_errors=True)[1], ModelError)
        assert isinstance(list(service.stream([0, 1], return_errors=True))[1], ModelError)
        assert isinstance(service.submit(1).exception(), ModelError)


def test_sixty_four_threads_share_batches() -> None:
    executor = FakeExecutor(squares)
    with blocking(executor) as service, ThreadPoolExecutor(64) as threads:

        def caller(number: int) -> list[Any]:
            return [future.result() for future in [service.submit(number * 100 + item) for item in range(100)]]

        answers = list(threads.map(caller, range(64)))
    assert [answer for each in answers for answer in each] == squares(list(range(6400)))
    assert sum(executor.sizes) == 6400
    assert 6400 / len(executor.sizes) > 8


def test_cancelling_withdraws_the_request() -> None:
    executor = Held()
    service = blocking(executor, max_queue_size=2)
    with service:
        running = service.submit("running")
        executor.came.wait()
        line, *outside = [service.submit(item) for item in range(4)]
        assert service.state()["waiting"] > 0
        for future in (running, line, *outside):
            assert future.cancel()
            assert future.cancel()
            assert future.cancelled()
            with pytest.raises(concurrent.futures.CancelledError):
                future.result()
        state = service.state()
        assert (state["waiting"], state["waiting_outside"]) == (0, 0)
        assert executor.cancelled == [(0, 1, [0])]
        assert concurrent.futures.wait([running, line]).not_done == set()
        service.stop(0.0)


class Incomparable:
    """A key that cannot be told from others."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise ValueError("no two are alike")


def test_what_cannot_be_put_into_the_line_fails_and_holds_up_nobody() -> None:
    never: Any = numpy.array([1.0, 2.0])
    with blocking(Held(), drain_timeout=0.0, max_queue_size=4) as service:
        wrong = [service.submit(1, timeout=never), *[service.submit(2, key=Incomparable()) for _ in range(2)]]
        right = service.submit(3, timeout=0.01)
        for call in (wrong[0], wrong[2]):
            with pytest.raises(ValueError, match=r"ambiguous|alike"):
                call.result(60)
        with pytest.raises(DeadlineExceeded):
            right.result(60)
        with pytest.raises(ValueError, match="ambiguous"):
            service.infer(1, timeout=never)
        refused = [service.submit(item, backpressure=False) for item in range(9)]
        assert isinstance(refused[-1].exception(), Overloaded)


def test_before_the_start_and_after_the_end_calls_are_refused() -> None:
    service = blocking()
    with pytest.raises(ModelNotReady, match="not started; start it with `with service`"):
        service.infer(3)
    service.stop()
    for _ in range(2):
        service.start()
        assert service.infer(3) == 9
        service.stop()
        service.stop()
    with pytest.raises(ModelNotReady, match="stopped"):
        service.infer(3)


def test_calls_that_race_with_the_stop_are_all_answered() -> None:
    for _ in range(10):
        service = blocking()
        service.start()
        futures: list[Any] = []

        def caller(service: BlockingService = service, futures: list[Any] = futures) -> None:
            for _ in range(500):
                try:
                    futures.append(service.submit(3))
                except ModelNotReady:
                    return

        threads = [threading.Thread(target=caller) for _ in range(4)]
        for thread in threads:
            thread.start()
        service.stop(0.0)
        for thread in threads:
            thread.join()
        assert concurrent.futures.wait(futures, timeout=200).not_done == set()


def test_a_service_that_nothing_refers_to_ends() -> None:
    executor = FakeExecutor(squares)
    service = blocking(executor)
    service.start()
    assert service.infer(3) == 9
    thread = next(each for each in threading.enumerate() if each.name == "weir-square")
    del service
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert executor.stopped


def test_a_stream_pulls_in_the_calling_thread_and_within_its_window() -> None:
    pulled: list[threading.Thread] = []

    def source() -> Iterator[int]:
        while True:
            pulled.append(threading.current_thread())
            yield len(pulled)

    with blocking(max_batch_size=4) as service:
        stream = service.stream(source())
        assert next(stream) == 1
        stream.close()
        assert len(pulled) <= service.service.stream_size
        assert set(pulled) == {threading.current_thread()}
        assert service.state()["waiting"] == 0


def test_a_preprocessor_that_raises_fails_its_item_alone() -> None:
    with blocking() as service:
        stream = service.stream(["3", "x", "4"], preprocessor=int, return_errors=True)
        answers = list(stream)
    assert answers[::2] == [9, 16]
    assert isinstance(answers[1], InvalidRequest)


def run_script(script: str, *, signal_after: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": SOURCE}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        head = ""
        if signal_after:
            while signal_after not in head:
                line = process.stdout.readline()
                assert line, process.communicate()[1]
                head += line
            process.send_signal(signal.SIGINT)
        try:
            out, errors = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, head + out, errors)


def test_what_the_model_raised_can_be_caught_and_shows_its_line() -> None:
    ended = run_script(
        """
        import weir
        class Picky(weir.Model):
            def predict(self, batch):
                raise ValueError("no such thing")
        class Streams(weir.Model):
            streaming = True
            def predict(self, batch):
                yield {0: 1}
                raise ValueError("no such thing")
        def caught(call, *arguments):
            try:
                call(*arguments)
            except ValueError as error:
                print(type(error).__name__)
        with weir.BlockingService(Streams) as service:
            caught(list, service.infer_stream(1))
        with weir.BlockingService(Picky) as service:
            caught(service.infer, 1)
            service.infer(1)
        """
    )
    assert ended.stdout.split() == ["ModelError", "ModelError"]
    assert ended.returncode == 1
    assert "weir.errors.ModelError: predict raised ValueError: no such thing" in ended.stderr
    assert "in predict\n" in ended.stderr


def test_ctrl_c_reaches_the_caller_and_ends_the_program() -> None:
    ended = run_script(
        """
        import os, signal, tempfile, time, weir
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
        class Waiter(weir.Model):
            def predict(self, batch):
                while not os.path.exists(batch[0]):
                    time.sleep(0.01)
                return batch
        with tempfile.TemporaryDirectory() as folder, weir.BlockingService(Waiter) as service:
            assert service.infer("/") == "/"
            try:
                print("waiting", flush=True)
                service.infer(f"{folder}/gate")
            except KeyboardInterrupt:
                print("interrupted")
            open(f"{folder}/gate", "w").close()
            print(service.infer("/"))
        """,
        signal_after="waiting",
    )
    assert (ended.stdout.split(), ended.stderr, ended.returncode) == (["waiting", "interrupted", "/"], "", 0)


class Gated(FakeExecutor):
    """Is ready when the test says so."""

    def __init__(self) -> None:
        super().__init__(squares)
        self.entered = threading.Event()
        self.gate = threading.Event()

    async def start(self, listener: Any) -> None:
        self.entered.set()
        await asyncio.to_thread(self.gate.wait, 20)
        await super().start(listener)


def together(count: int, work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returned, or raised, in so many threads that begin at once."""
    begin = threading.Barrier(count)

    def run() -> Any:
        begin.wait()
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        calls = [threads.submit(run) for _ in range(count)]
        return [call.result(60) for call in calls]


def test_threads_that_race_to_start_it_all_get_a_service_that_runs() -> None:
    for _ in range(3):
        service = blocking()

        def use(service: BlockingService = service) -> Any:
            if not service.ready:
                service.start()
            return service.infer(3, timeout=20)

        assert together(40, use) == [9] * 40
        service.stop()
    service = blocking(FakeExecutor(start_error=ModelError("no weights")))
    assert {str(error) for error in together(8, service.start)} == {"no weights"}
    with pytest.raises(ModelNotReady, match="no weights"):
        service.infer(3)


def test_a_stop_ends_a_start_that_is_under_way() -> None:
    executor = Gated()
    service = blocking(executor)
    with ThreadPoolExecutor(2) as threads:
        starting = threads.submit(service.start)
        assert executor.entered.wait(60)
        stopping = threads.submit(service.stop)
        executor.gate.set()
        stopping.result(60)
        starting.exception(20)
    assert not service.ready
    with pytest.raises(ModelNotReady):
        service.infer(3)
    service.start()
    assert service.infer(3) == 9
    service.stop()


def test_starts_and_stops_may_race() -> None:
    service = blocking()

    def restart() -> None:
        for _ in range(5):
            service.start()
            with contextlib.suppress(ModelNotReady, Draining):
                assert service.infer_many([3], timeout=20) == [9]
            service.stop(0.0)

    assert not [error for error in together(8, restart) if error is not None and not isinstance(error, ModelNotReady)]
    service.stop()


FORKED = """
    import os, sys, weir
    class Square(weir.Model):
        def predict(self, batch):
            return [x * x for x in batch]
    service = weir.BlockingService(Square)
    service.start()
    print(service.infer(3), flush=True)
    if os.fork() == 0:
        print(service.ready, service.not_ready_reason, flush=True)
        for call in (lambda: service.infer(3, timeout=1), lambda: service.infer_many([3]), service.state):
            try:
                call()
            except weir.ModelNotReady as error:
                print(error, flush=True)
        service.start()
        print(service.infer(4), flush=True)
        service.stop()
        sys.exit()
    assert os.wait()[1] == 0
    print(service.infer(5))
    service.stop()
"""


def test_after_a_fork_it_is_not_ready_until_it_is_started_there() -> None:
    ended = run_script(FORKED)
    first, state, *refusals, fourth, fifth = ended.stdout.splitlines()
    assert (first, fourth, fifth, ended.stderr, ended.returncode) == ("9", "16", "25", "", 0)
    ready, reason = state.split(" ", 1)
    assert ready == "False"
    assert "forked" in reason
    assert refusals == [f"model 'square' is not ready: {reason}"] * 3


@pytest.mark.parametrize("before", ["", "gc.freeze()"])
def test_a_call_under_way_at_a_fork_fails_in_the_child_alone(before: str) -> None:
    ended = run_script(
        """
        import concurrent.futures, gc, os, sys, threading, weir
        go = threading.Event()
        class Slow(weir.Model):
            def predict(self, batch):
                go.wait()
                return [x * x for x in batch]
        service = weir.BlockingService(Slow, executor="thread")
        service.start()
        calls = [service.submit(number) for number in range(3)]
        BEFORE
        if os.fork() == 0:
            concurrent.futures.wait(calls)
            print([type(call.exception()).__name__ for call in calls], calls[0].exception(), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
        go.set()
        print([call.result() for call in calls])
        service.stop()
    """.replace("BEFORE", before)
    )
    assert (ended.stderr, ended.returncode) == ("", 0)
    child, parent = ended.stdout.splitlines()
    assert child.startswith("['ModelNotReady', 'ModelNotReady', 'ModelNotReady']")
    assert "forked" in child
    assert parent == "[0, 1, 4]"


def test_a_service_of_ones_own_is_refused_after_a_fork() -> None:
    ended = run_script(
        FORKED.replace("BlockingService(Square)", "BlockingService(weir.Service(Square))").replace(
            "        service.start()\n        print(service.infer(4), flush=True)\n",
            "        try:\n            service.start()\n        except weir.errors.Conflict as error:\n            print(error)\n",
        )
    )
    refusal = ended.stdout.splitlines()[-2]
    assert "forked" in refusal
    assert "make a Service" in refusal
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_a_program_that_never_closes_its_service_ends_in_peace() -> None:
    ended = run_script(
        """
        import time, weir
        class Square(weir.Model):
            def predict(self, batch):
                time.sleep(batch[0] // 300)
                return [x * x for x in batch]
        service = weir.BlockingService(Square)
        service.start()
        print(service.infer(3), service.state()["workers"][0]["pid"])
        futures = [service.submit(300) for _ in range(10)]
        stream = service.stream(range(10000))
        next(stream)
        """
    )
    answer, pid = ended.stdout.split()
    assert (answer, ended.stderr, ended.returncode) == ("9", "", 0)
    assert not Path(f"/proc/{pid}").exists()


def test_threads_that_post_without_pause_do_not_starve_the_loop() -> None:
    stop = threading.Event()
    background = Background("weir-test", lambda _: None, lambda _: None)
    background.start()

    def pester() -> None:
        while not stop.is_set():
            background.post(1)

    threads = [threading.Thread(target=pester) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def turn() -> int:
        await asyncio.sleep(0)
        return 7

    assert [background.run(turn()) for _ in range(5)] == [7] * 5
    stop.set()
    for thread in threads:
        thread.join()
    background.close()


def test_closing_runs_the_last_thing_first_also_from_the_loop_itself() -> None:
    for from_loop in (False, True):
        ran = threading.Event()

        async def last(ran: threading.Event = ran) -> None:
            ran.set()

        background = Background("weir-test", lambda _: None, lambda _: None)
        background.start()
        thread = background._thread

        async def close(background: Background = background, last: Any = last) -> None:
            background.close(last)

        if from_loop:
            background.run(close())
        else:
            background.close(last)
        thread.join(60)
        assert ran.is_set()
        assert not thread.is_alive()
