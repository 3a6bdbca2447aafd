from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from weir.commands.options import check_results, check_writable, print_table, write_atomically
from weir.errors import SettingsError


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    write_atomically(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "second \ud800")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    check_writable(tmp_path / "profile.toml")
    with pytest.raises(SettingsError, match="is a directory; must be a file"):
        check_writable(tmp_path)
    with pytest.raises(SettingsError, match="must be a writable directory"):
        check_writable(tmp_path / "missing" / "profile.toml")


def test_results_are_refused_before_the_work_and_stdout_never_is(tmp_path: Path) -> None:
    check_results(Path("-"), None, tmp_path / "it.md")
    with pytest.raises(SettingsError, match="cannot be written"):
        check_results(None, tmp_path)


def test_what_cannot_be_written_after_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"it\.toml: cannot be written: No such file or directory"):
        write_atomically(tmp_path / "missing" / "it.toml", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match="folder: cannot be written: Is a directory"):
        write_atomically(tmp_path / "folder", "")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


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
