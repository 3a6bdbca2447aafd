"""The progress bar of a run. Another process draws it: drawing takes milliseconds, which would be send lag.

The other process reads one JSON document per line, {"done", "whole", "text"}, and draws on stderr until its input ends.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec

from weir.bench.run import Turn
from weir.bench.target import Ledger

_INTERVAL = 0.25  # seconds
_LOOKED_AT = 256  # requests whose send lag is shown


class Display:
    """What the run shows itself on: `watch` is told of each turn, and `run` shows how it goes until it is cancelled.

    Use it as a context manager; without `shown` it does nothing.
    """

    def __init__(self, shown: bool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._turn: Turn | None = None
        self._ledger = Ledger()
        self._since = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if self._shown:
            command = [sys.executable, "-c", "from weir.bench.display import draw; draw()"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None, "it was asked for"
            os.set_blocking(self._process.stdin.fileno(), False)
        return self

    def watch(self, turn: Turn, ledger: Ledger) -> None:
        """Show this turn from now on."""
        self._turn, self._ledger, self._since = turn, ledger, self._clock()

    async def run(self) -> None:
        """Show the state a few times a second. What the other process does not read in time is lost."""
        while self._process is not None and self._process.stdin is not None:
            await asyncio.sleep(_INTERVAL)
            if self._turn is not None:
                with suppress(OSError):
                    os.write(
                        self._process.stdin.fileno(), state_line(self._turn, self._ledger, self._clock() - self._since)
                    )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            self._process.wait()


def state_line(turn: Turn, ledger: Ledger, elapsed: float) -> bytes:
    """Return what is to be drawn `elapsed` seconds after the beginning of a turn."""
    done = turn.index * turn.seconds + min(elapsed, turn.seconds)
    text = f"{ledger.begun:,} sent, {ledger.over - ledger.failed:,} ok, {ledger.failed:,} failed"
    if ledger.recent:
        times = sorted(ledger.recent)
        p50, p99 = (times[int(share * len(times))] * 1000.0 for share in (0.5, 0.99))
        text += f", p50 {p50:.3g} p99 {p99:.3g} ms"
    last = range(max(0, ledger.begun - _LOOKED_AT), ledger.begun)
    lags = [ledger.sent[index] - ledger.intended[index] for index in last if ledger.sent[index] == ledger.sent[index]]
    if lags:
        text += f", send lag {max(lags) * 1000.0:.2g} ms"
    return (
        msgspec.json.encode({"done": done, "whole": turn.count * turn.seconds, "text": f"{text}, {turn.target}"})
        + b"\n"
    )


def draw() -> None:
    """Draw what comes on stdin, until its end."""
    os.nice(10)  # what is measured goes first
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (BarColumn(bar_width=12), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    console = Console(stderr=True)
    with Progress(*columns, text, console=console, transient=True, auto_refresh=False, expand=True) as progress:
        row = progress.add_task("", total=None)
        for line in sys.stdin.buffer:
            said: dict[str, Any] = msgspec.json.decode(line)
            progress.update(row, completed=said["done"], total=said["whole"], description=said["text"], refresh=True)
