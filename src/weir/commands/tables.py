"""Tables of commands: no column is ever cut off, for a number that is missing is worse than a line that is broken."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNBOUNDED = 10_000  # columns


def print_table(console: "Console", table: "Table") -> None:
    """Print `table`, as wide as it must be: a terminal that is narrower breaks its lines, a file has no width.

    Only columns that say that they fold are made narrower.
    """
    from rich.measure import Measurement

    before, unbounded = console.width, console.options.update_width(UNBOUNDED)
    most = least = Measurement.get(console, unbounded, table).maximum
    for column in table.columns:
        width = max(Measurement.get(console, unbounded, cell).maximum for cell in column.cells)
        if column.overflow == "fold":
            least -= max(0, width - (column.min_width or 1))
        else:
            column.no_wrap, column.min_width = True, width
    console.width = max(least, min(most, before)) if console.is_terminal else most
    try:
        console.print(table)
    finally:
        console.width = before
