"""Wakes the event loop at an instant, to a few hundredths of a millisecond: its own timers count in whole ones."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

_CLOCK_MONOTONIC = 1  # the clock of time.monotonic
_TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_SOONEST = 1e-9  # 0 would disarm it


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Waker(Protocol):
    """Calls back once, not before the instant that it was last set to."""

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at `when`, seconds of the clock; what was set before is forgotten."""


class Alarm:
    """A Waker for the running event loop and time.monotonic: a timer of the kernel's (timerfd). Close it."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._value = _Itimerspec()
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._file, self._fire)

    def set(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at `when`; at once if that is over."""
        self._callback = callback
        seconds, fraction = divmod(max(when, _SOONEST), 1.0)
        self._value.value.seconds, self._value.value.nanoseconds = int(seconds), int(fraction * 1e9)
        if self._libc.timerfd_settime(self._file, _TFD_TIMER_ABSTIME, ctypes.byref(self._value), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fire(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set anew since
            return
        self._callback()

    def close(self) -> None:
        """Never call back again. Idempotent."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
