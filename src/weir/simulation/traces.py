"""Recorded arrivals, as CSV: the header `arrival_s,rows`, then one line per request in the order of arrival.

Times are in seconds from any origin; `rows` may be left out, with its header, when every request has one row.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
HEADER = ("arrival_s", "rows")


def read_trace(path: str | Path) -> tuple[Floats, Ints]:
    """Return the arrivals (seconds, from 0 on) and rows of the requests recorded in `path`.

    Raises SettingsError naming the file, the line, the value and what must hold: numbers, times that do not go back, rows
    of at least 1, at least two requests.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"trace {str(path)!r} cannot be read: {error}") from error
    header = tuple(cell.strip() for cell in lines[0].split(",")) if lines else ()
    if header not in (HEADER, HEADER[:1]):
        raise SettingsError(f"{path}, line 1: must be the header {','.join(HEADER)}; is {','.join(header)!r}")
    times: list[float] = []
    rows: list[int] = []
    last = -np.inf
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            arrival, size = _read(line.split(","), len(header), last)
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: {line!r}: {error}") from None
        times.append(arrival)
        rows.append(size)
        last = arrival
    if len(times) < 2 or last <= times[0]:
        raise SettingsError(f"{path}: a trace has at least two requests, at different times; this one has {len(times)}")
    return np.array(times) - times[0], np.array(rows, dtype=np.int64)


def _read(cells: list[str], columns: int, last: float) -> tuple[float, int]:
    if len(cells) != columns:
        raise ValueError(f"must have {columns} value(s)")
    try:
        arrival = float(cells[0])
        rows = int(cells[1]) if columns > 1 else 1
    except ValueError:
        raise ValueError("must be a number of seconds and a whole number of rows") from None
    if not np.isfinite(arrival):
        raise ValueError("the arrival must be finite")
    if arrival < last:
        raise ValueError(f"arrives before the line above, at {last:g}; arrivals must not go back")
    if rows < 1:
        raise ValueError("rows must be 1 or more")
    return arrival, rows


def write_trace(path: str | Path, times: Iterable[float], rows: Iterable[int] | None = None) -> None:
    """Write arrivals (seconds, ascending) and rows (1 each if left out), so that `read_trace` returns them to the bit."""
    arrivals = [float(time) for time in times]
    sizes = [1] * len(arrivals) if rows is None else [int(size) for size in rows]
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.write(",".join(HEADER) + "\n")
        file.writelines(f"{arrival!r},{size}\n" for arrival, size in zip(arrivals, sizes, strict=True))
