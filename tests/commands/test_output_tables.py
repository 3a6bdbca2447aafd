from io import StringIO

import pytest
from rich.console import Console
from rich.table import Table

from weir.commands.output import print_table


@pytest.mark.parametrize("terminal", [False, True])
def test_no_column_is_cut_off(terminal: bool) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", overflow="fold", min_width=6)
    for number in range(8):
        table.add_column(f"column {number}", no_wrap=True)
    table.add_row("size-or-delay:size=32", *["12.345 ± 0.678"] * 8)
    console = Console(file=StringIO(), width=60, force_terminal=terminal, color_system=None)
    print_table(console, table)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "column 7" in shown
    assert shown.count("12.345 ± 0.678") == 8
    assert ("size-or-delay:size=32" in shown) is not terminal  # a name may be folded, for there it saves width
    assert console.width == 60
