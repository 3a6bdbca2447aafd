"""The table of families and tasks: each cell that says yes is a parameter of a test that compares the family in that task, and no other is."""

import re
from itertools import product

from tests.documentation.pages import ROOT
from tests.rings import subcases
from tests.text_models.late_models import CASES
from tests.text_models.runtime.references import CLASSIFIERS, FAMILIES, LABELLERS, READS, SPARSE

from weir.text_models.checkpoint.families import FAMILIES as SERVED

PAGE = ROOT / "docs" / "reference" / "supported-text-models.md"
# The families that tests compare, by column; yes or no: tests/text_models/graph/test_heads.py.
COMPARED = {
    "vectors": set(FAMILIES), "scores and labels": {*CLASSIFIERS, *READS}, "labels of tokens": set(LABELLERS), "SPLADE": set(SPARSE),
    "late interaction": {case.partition(",")[0] for case in CASES}, "yes or no": {"qwen2", "qwen3"},
}  # fmt: skip
# What tests call a model_type, where they call it something else.
NAMES = {
    "deberta-v2": ("deberta-v2", "deberta-v3"), "nomic_bert": ("nomic-bert",), "new": ("gte",), "gte": ("gte",),
    "gemma3_text": ("gemma3", "gemma3-causal"), "electra": ("electra", "electra-large"),
}  # fmt: skip


def rows() -> tuple[list[str], dict[str, list[str]]]:
    """Return the columns of the table, and the cells of each row by its types of models."""
    lines = PAGE.read_text().partition("## Families and tasks\n")[2].partition("\n## ")[0].splitlines()
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return found[0][1:], {row[0]: row[1:] for row in found[2:]}


COLUMNS, ROWS = rows()


def test_the_table_has_every_family_and_task() -> None:
    assert list(COMPARED) == COLUMNS
    assert sorted(kind for row in ROWS for kind in re.findall(r"`(.+?)`", row)) == sorted(SERVED)


@subcases(("row", "column"), product(ROWS, COMPARED))
def test_a_cell_says_what_tests_compare(row: str, column: str) -> None:
    names = {name for kind in re.findall(r"`(.+?)`", row) for name in NAMES.get(kind, (kind,))}
    assert (ROWS[row][COLUMNS.index(column)] == "yes") == bool(names & COMPARED[column])
