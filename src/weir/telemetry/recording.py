"""Writes down when requests arrive, so that a simulation or a load test can play the same traffic again.

The form is CSV with the header `arrival_s,rows`: seconds from the first arrival, and the rows of the request.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from weir.errors import CapacityError, DeadlineExceeded, SettingsError, WeirError
from weir.messages import Request
from weir.telemetry.silent import SilentObserver

logger = logging.getLogger("weir")

# Requests are heard of at their end, and so not in the order of their arrival: as many as this are kept to be sorted.
# More than that are seldom under way at once.
KEPT = 8192
# Lines written at once: about a millisecond of the event loop's time.
WRITTEN_AT_ONCE = 2048


class Recorder(SilentObserver):
    """An Observer that writes the arrivals of one model to `path`.

    Every request that was accepted is in it once, and every one that was refused for want of room or time, as one row.
    Requests that were at fault themselves (malformed, no such model) are not: they are no work. `model` None records
    whatever it hears. Lines ascend: a request that has its end after more than `kept` that arrived later is
    written with the time of the line before it. What is kept is written by `close`.
    """

    def __init__(
        self, path: str | Path, model: str | None = None, *, clock: Callable[[], float] = time.monotonic,
        kept: int = KEPT,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self._model = model
        self._clock = clock
        self._kept = kept
        self._arrivals: list[tuple[float, int]] = []
        self._first: float | None = None
        self._last = 0.0
        self._file: TextIO | None = None

    def open(self) -> None:
        """Begin the file. Raises SettingsError when it cannot be written."""
        try:
            self._file = self.path.open("w", encoding="ascii")
        except OSError as error:
            raise SettingsError(f"record={str(self.path)!r}: cannot be written: {error.strerror}") from error
        self._file.write("arrival_s,rows\n")

    def close(self) -> None:
        """Write what is kept, and end the file. Idempotent."""
        self._write(len(self._arrivals))
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()  # which writes what is buffered
            except OSError as error:
                self._gave_up(error)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Note requests that had their end."""
        if self._model is None or model == self._model:
            self._note([(request.arrival, request.rows) for request in requests])

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Note a request that found no room, or no time."""
        if isinstance(error, (CapacityError, DeadlineExceeded)) and (self._model is None or model == self._model):
            self._note([(self._clock(), 1)])

    def _note(self, arrivals: list[tuple[float, int]]) -> None:
        if self._file is None:
            return
        self._arrivals += arrivals
        while len(self._arrivals) >= self._kept + WRITTEN_AT_ONCE:
            self._write(WRITTEN_AT_ONCE)

    def _write(self, count: int) -> None:
        """Write the `count` earliest. Where that fails, recording ends and the server goes on."""
        if self._file is None or not count:
            return
        try:
            self._write_lines(self._file, count)
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
            self._gave_up(error)

    def _gave_up(self, error: OSError) -> None:
        self._arrivals.clear()
        logger.error("record=%r: cannot be written any more: %s", str(self.path), error.strerror)

    def _write_lines(self, file: TextIO, count: int) -> None:
        self._arrivals.sort()
        if self._first is None:
            self._first = self._arrivals[0][0]
        first, last = self._first, self._last
        file.writelines(f"{max(at - first, last):.6f},{rows}\n" for at, rows in self._arrivals[:count])
        self._last = max(self._arrivals[count - 1][0] - first, last)
        del self._arrivals[:count]


def recorders(path: str, models: Sequence[str]) -> list[Recorder]:
    """Return a recorder for each of `models`: to `path` itself if there is one, else to PATH with the model's name before
    the ending."""
    if len(models) == 1:
        return [Recorder(path, models[0])]
    whole = Path(path)
    return [Recorder(whole.with_name(f"{whole.stem}.{model}{whole.suffix}"), model) for model in models]
