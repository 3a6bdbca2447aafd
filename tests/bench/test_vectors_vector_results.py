"""The tables of sentence vectors in files."""

import json
from pathlib import Path

from weir.bench.vectors import Table, as_json, as_markdown, draw

TABLES = [
    Table("Clients", ["clients", "texts/s each", "texts/s in all"], [(1, 75.0, 75.0), (2, 50.5, 101.0)], "Each waits."),
    Table("Small requests and large ones", ["clients", "requests each has under way", "texts/s"], [(8, 32, 9.5)]),
]
MACHINE = {"machine": "two CPUs", "versions": {"weir": "0.1.0"}}


def test_json_has_the_numbers_as_they_were_measured() -> None:
    read = json.loads(as_json(TABLES, MACHINE))
    assert read["machine"] == MACHINE and read["tables"][0]["rows"] == [[1, 75.0, 75.0], [2, 50.5, 101.0]]


def test_markdown_says_at_its_end_what_was_measured_on() -> None:
    text = as_markdown(TABLES, MACHINE)
    assert "| 2 | 50.5 | 101 |" in text and text.endswith("<sub>machine two CPUs, versions weir 0.1.0.</sub>\n")


def test_a_picture_has_a_panel_for_each_table_of_one_thing_that_changes(tmp_path: Path) -> None:
    draw(TABLES, tmp_path / "tables.svg")
    drawn = (tmp_path / "tables.svg").read_text()
    assert "Clients" in drawn and "texts/s in all" in drawn and "Small requests" not in drawn
    assert (tmp_path / "tables.png").stat().st_size
