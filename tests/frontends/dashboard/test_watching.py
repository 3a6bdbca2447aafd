import asyncio
import json
from collections.abc import Callable
from typing import Any

from tests.frontends.dashboard.kit import Scene

from weir.frontends.dashboard.watching import REST, Ring, SamplingTimer, Watch


class Timers:
    """A clock with at most one timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: float | None = None
        self._callback: Callable[[], None] | None = None

    def later(self, seconds: float, callback: Callable[[], None]) -> "Timers":
        self.due, self._callback = self.now + seconds, callback
        return self

    def cancel(self) -> None:
        self.due = None

    def fire(self, late: float = 0.0) -> None:
        assert self.due is not None
        assert self._callback is not None
        self.now, self.due = self.due + late, None
        self._callback()


def make_timer(patience: float = 900.0) -> tuple[SamplingTimer, Timers, list[float]]:
    delays: list[float] = []
    timers = Timers()
    return SamplingTimer(delays.append, patience=patience, clock=lambda: timers.now, later=timers.later), timers, delays


def test_nothing_beats_while_nobody_looks() -> None:
    timer, timers, delays = make_timer(patience=3.0)
    assert (timers.due, delays, timer.running) == (None, [], False)
    timer.look()
    assert (timers.due, delays, timer.running) == (1.0, [0.0], True)
    for _ in range(4):
        timers.fire()
    assert (timers.due, len(delays), timer.running) == (None, 4, False)
    timer.look()
    assert (timers.due, len(delays)) == (5.0, 5)
    timer.stop()
    timer.stop()
    assert timers.due is None


def test_a_late_beat_does_not_move_the_others_and_a_missed_one_is_not_made_up_for() -> None:
    timer, timers, delays = make_timer()
    timer.look()
    timers.fire(late=0.25)
    assert (delays[-1], timers.due) == (0.25, 2.0)
    timers.fire(late=5.0)
    assert (delays[-1], timers.due) == (5.0, 8.0)
    timer.look()
    assert (len(delays), timers.due) == (3, 8.0)


def test_it_beats_slowly_while_nobody_looks_once_it_has_begun() -> None:
    timer, timers, delays = make_timer(patience=2.0)
    timer.begin()
    timer.begin()
    assert (delays, timers.due) == ([0.0], REST)
    timers.fire()
    assert (len(delays), timers.due) == (2, 2 * REST)
    timer.look()  # at once, and every second from now on
    assert (len(delays), timers.due) == (3, REST + 1.0)
    for _ in range(4):
        timers.fire()
    assert (len(delays), timers.due) == (7, REST + 3.0 + 2 * REST)
    timer.stop()
    assert timers.due is None


def test_a_beat_on_a_real_loop() -> None:
    async def main() -> int:
        delays: list[float] = []
        timer = SamplingTimer(delays.append)
        timer.look()
        timer.stop()
        return len(delays)

    assert asyncio.run(main()) == 1


def test_the_ring_keeps_the_newest_within_its_bounds() -> None:
    ring = Ring(kept=3, kept_bytes=10)
    for number in range(1, 6):
        ring.put(b"%d" % number)
    assert ring.since(0) == (5, [b"3", b"4", b"5"])
    assert ring.since(4) == (5, [b"5"])
    assert ring.since(5) == (5, [])
    assert ring.since(99) == (5, [])
    ring.put(b"123456789")
    assert ring.since(0) == (6, [b"5", b"123456789"])
    assert ring.size_bytes == 10
    ring.put(b"far too large")
    assert ring.since(0) == (7, [])
    assert Ring().since(0) == (0, [])


def test_a_long_answer_comes_in_parts() -> None:
    ring = Ring()
    for number in range(1, 5):
        ring.put(b"%d" % number * 4)
    assert ring.since(0, 8) == (2, [b"1111", b"2222"])
    assert ring.since(2, 8) == (4, [b"3333", b"4444"])
    assert ring.since(0, 1) == (1, [b"1111"])


def watched(scene: Scene, ring: Ring | None = None) -> tuple[Watch, Timers]:
    timers = Timers()
    ring = ring or Ring()
    return Watch(scene.sampler, ring, counted=True, clock=lambda: timers.now, later=timers.later), timers


def test_whoever_looks_gets_what_is_new_to_him() -> None:
    scene = Scene("square")
    watch, timers = watched(scene)

    def look(*arguments: Any) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(watch.look(*arguments))
        return document

    async def script() -> None:
        first = look()
        assert (first["samples"], first["last"], first["more"]) == ([], 0, False)
        assert first["now"]["models"]["square"]["ready"] is True
        for _ in range(3):
            scene.now += 1
            await scene.infer("square", 1)
            timers.fire()
        assert [sample["number"] for sample in look(first["life"], 1)["samples"]] == [2, 3]
        again = look(first["life"], 3)
        assert (again["samples"], again["last"]) == ([], 3)
        assert again["now"]["models"]["square"]["counts"]["rows"][-1] == 3
        stranger = look("of another process", 2)
        assert [sample["models"]["square"]["rows"][-1] for sample in stranger["samples"]] == [1, 1, 1]
        assert stranger["server"]["buckets"]["rows"][0] == 1

    scene.play(script)


def test_a_day_of_watching_keeps_fifteen_minutes() -> None:
    scene = Scene("square")
    ring = Ring()
    watch, timers = watched(scene, ring)
    watch.look()
    for _ in range(2000):
        scene.now += 1
        timers.fire()
        watch.timer.look()
    _, samples = ring.since(0)
    assert len(samples) == 900
    first, last = json.loads(samples[0]), json.loads(samples[-1])
    assert last["at"] - first["at"] == 899
