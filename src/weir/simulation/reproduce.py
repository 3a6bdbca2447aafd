"""Recompute a paper: `weir reproduce smdp`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weir.simulation.paper import claims_accuracy, claims_comparison, claims_method, claims_model, claims_shape
from weir.simulation.paper.claims import Verdict
from weir.simulation.paper.figures import PICTURES
from weir.simulation.paper.findings import Findings
from weir.simulation.paper.report import Checked, page

CLAIMS = (
    *claims_model.CLAIMS,
    *claims_method.CLAIMS,
    *claims_shape.CLAIMS,
    *claims_comparison.CLAIMS,
    *claims_accuracy.CLAIMS,
)
NAME = "smdp.md"
Progress = Callable[[str, int, int], None]  # what, done, of how many


class Reproduction(NamedTuple):
    """The report's file, and the claims with their verdicts."""

    path: Path
    checked: list[Checked]

    def count(self, verdict: Verdict) -> int:
        """Return how many claims have that verdict."""
        return sum(each.judgement.verdict is verdict for each in self.checked)


def reproduce(folder: Path, progress: Progress | None = None) -> Reproduction:
    """Recompute the paper's table, figures and claims, and write the report and its pictures to `folder`.

    `progress` is told what is being done, and how many claims and pictures are done, of how many. Raises SettingsError
    without matplotlib.
    """
    told = progress or (lambda what, done, total: None)
    total = len(CLAIMS) + len(PICTURES)
    done = 0
    findings = Findings(lambda what: told(what, done, total))
    checked = []
    for claim in CLAIMS:
        told(claim.where, done, total)
        checked.append(Checked(claim, claim.check(findings)))
        done += 1
    for picture in PICTURES:
        told(picture.name, done, total)
        picture.draw(findings, folder / picture.name)
        done += 1
    path = folder / NAME
    path.write_text(page(findings, checked, PICTURES), encoding="utf-8")
    told("done", total, total)
    return Reproduction(path, checked)
