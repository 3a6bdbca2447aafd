"""Claims that are quick to check are checked; that all are well formed, and in the committed report, is held for all."""

import json
import re
from pathlib import Path

import pytest
from reproduction.claims import Claim, Verdict
from reproduction.findings import Findings
from reproduction.published import TABLE
from reproduction.report import CLAIMS
from tests.rings import spread

REPORT = Path(__file__).parents[2] / "docs" / "reproduction"
FINDINGS = Findings()
SLOW = (
    "never use more energy", "have, generally, a control limit", "numbers of the table", "abstract cost saves", "are below 0.001",
    "least s_max, 70", "work grows for larger", "converges at about", "mostly overestimate", "Δ falls with", "drops sharply", "nearly stable",
    "best objective", "Little's law", "close to the optimum", "By the weights",
)  # fmt: skip
EXPECTED = {
    "Larger batches use less": Verdict.HELD, "The larger η": Verdict.HELD, "grows with w2": Verdict.HELD,
    "With w2 = 500": Verdict.LIMITED, "With w1 = 1, w2 = 0": Verdict.HELD, "far from optimal for w2 > 5": Verdict.LIMITED,
    "works badly at ρ = 0.1": Verdict.HELD, "Batches of 8 at ρ = 0.7": Verdict.HELD, "do not keep up from ρ = 0.8": Verdict.HELD,
    "considerably later at ρ = 0.9": Verdict.HELD, "η must be below": Verdict.HELD, "is optimal in the infinite model": Verdict.LIMITED,
}  # fmt: skip


def text_of(page: str) -> str:
    return " ".join(page.split())


@pytest.mark.parametrize(
    "claim",
    spread([each for each in CLAIMS if not any(part in each.says for part in SLOW)], 4),
    ids=lambda claim: claim.says[:40],
)
def test_a_quick_claim_has_a_verdict_with_numbers(claim: Claim) -> None:
    verdict, numbers = claim.check(FINDINGS)
    assert numbers.endswith(".")
    assert verdict is Verdict.NOT_COMPUTED or re.search(r"\d", numbers) or "(21)" in numbers or "limitation" in numbers
    for part, expected in EXPECTED.items():
        if part in claim.says:
            assert verdict is expected


def test_every_expectation_is_of_a_claim() -> None:
    for part in (*EXPECTED, *SLOW):
        assert sum(part in claim.says for claim in CLAIMS) == 1, part


def test_the_committed_report_has_every_claim() -> None:
    page, found = (REPORT / "smdp.md").read_text(), json.loads((REPORT / "claims.json").read_text())
    assert len(found) == len(CLAIMS)
    for number, (claim, one) in enumerate(zip(CLAIMS, found, strict=True), 1):
        verdict = one["verdict"].capitalize()
        assert (one["number"], one["claim"], one["where"]) == (number, claim.says, claim.where)
        assert f"| {number} | {claim.says} | {claim.where} | *{verdict}.*" in page
        assert one["verdict"] == "held" or claim.limits in page
    assert f"Of {len(CLAIMS)} statements" in text_of(page)


def test_the_committed_table_is_what_is_computed() -> None:
    page = (REPORT / "smdp.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = {name: cells for name, *cells in lines}
    column, ours = TABLE[2], FINDINGS.minimum(TABLE[2].overflow_cost).accepted
    said = {name: rows[name][2].split(" / ") for name in ("least s_max", "sweeps", "space", "Δ", "g")}
    assert said["least s_max"] == [str(ours.s_max), str(column.s_max)]
    assert abs(int(said["sweeps"][0]) - ours.iterations) <= 1  # another BLAS may round otherwise
    assert said["space"] == [str(ours.space), str(column.space)]
    assert float(said["Δ"][0]) == pytest.approx(ours.delta, rel=0.01)
    assert float(said["g"][0]) == pytest.approx(ours.cost, abs=2e-4)
    for at, other in enumerate(TABLE):
        assert rows["least s_max"][at] == f"{other.s_max} / {other.s_max}"


def test_the_committed_pictures_are_small() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (REPORT / "smdp.md").read_text())
    assert len(pictures) == 8
    for name in pictures:
        assert (REPORT / name).stat().st_size < 150_000
