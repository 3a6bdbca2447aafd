"""The table of families and tasks: each cell that says yes is a parameter of a test that compares the family in that task, and no other is."""

import re
from itertools import product

from tests.documentation.pages import ROOT, table
from tests.rings import subcases
from tests.text_models.late_models import CASES
from tests.text_models.runtime.references import CLASSIFIERS, ENCODERS, FAMILIES, LABELLERS, READS, SPARSE
from tests.text_models.tiny_towers import KINDS

from weir.text_models.checkpoint.families import FAMILIES as SERVED

PAGE = ROOT / "docs" / "reference" / "supported-text-models.md"
# The families that tests compare, by column; yes or no: tests/text_models/graph/test_heads.py.
COMPARED = {
    "vectors": {*FAMILIES, *ENCODERS, *KINDS}, "scores and labels": {*CLASSIFIERS, *READS}, "labels of tokens": set(LABELLERS), "SPLADE": set(SPARSE),
    "late interaction": {case.partition(",")[0] for case in CASES}, "yes or no": {"qwen2", "qwen3"},
}  # fmt: skip
# What tests call a model_type, where they call it something else.
NAMES = {
    "deberta-v2": ("deberta-v2", "deberta-v3"), "nomic_bert": ("nomic-bert",), "new": ("gte",), "gte": ("gte",),
    "gemma3_text": ("gemma3", "gemma3-causal"), "electra": ("electra", "electra-large"),
}  # fmt: skip


(_, *COLUMNS), *FOUND = table(PAGE.read_text(), "Families and tasks")
ROWS = {kinds: cells for kinds, *cells in FOUND}


def test_the_table_has_every_family_and_task() -> None:
    assert list(COMPARED) == COLUMNS
    assert sorted(kind for row in ROWS for kind in re.findall(r"`(.+?)`", row)) == sorted(SERVED)


@subcases(("row", "column"), product(ROWS, COMPARED))
def test_a_cell_says_what_tests_compare(row: str, column: str) -> None:
    names = {name for kind in re.findall(r"`(.+?)`", row) for name in NAMES.get(kind, (kind,))}
    assert (ROWS[row][COLUMNS.index(column)] == "yes") == bool(names & COMPARED[column])
