"""The report: Table I, every claim with its verdict, and the figures, as one Markdown page; and the numbers of each claim as JSON."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from reproduction import claims_accuracy, claims_comparison, claims_method, claims_model, claims_shape
from reproduction.claims import Claim, Judgement, Verdict
from reproduction.claims_accuracy import rows
from reproduction.figures import PICTURES, Picture
from reproduction.findings import Findings
from reproduction.published import TABLE

CLAIMS = (
    *claims_model.CLAIMS,
    *claims_method.CLAIMS,
    *claims_shape.CLAIMS,
    *claims_comparison.CLAIMS,
    *claims_accuracy.CLAIMS,
)
NAME, DATA = "smdp.md", "claims.json"
Report = Callable[[str, int, int], None]  # what is being done, how much is done, of how much
_WIDTH = 150
_INTRODUCTION = """\
Xu, Sun, Zhou and Niu, *SMDP-based dynamic batching for efficient inference on GPU-based platforms* ([arXiv 2301.12865](https://arxiv.org/abs/2301.12865)), \
recomputed with Weir's solver by `make reproduce`, which writes this page. The setting is that of section V: GoogLeNet on a Tesla P4, batches of up to 32, \
τ(b) = 0.3051·b + 1.052 ms, ζ(b) = 19.90·b + 19.60 mJ. ρ is the load; w1 and w2 weigh the mean response time in ms and the mean power in W. \
[Solved policies](../explanation/solved-policies.md) explains the model."""
_TABLE_NOTE = """\
Ours / the paper's. "Exact s_max" is what exact comparison would accept. Space is Bmax·s_max, time sweeps·Bmax·s_max². Accepted is the first s_max from 32 on \
whose policy serves and whose Δ is below 0.001; η is 0.99 of its bound, ε = 0.01, at most 10000 sweeps."""
_CLAIMS_NOTE = """The numbers behind each verdict are in `docs/reproduction/claims.json`."""


class Checked(NamedTuple):
    """A claim and what became of it."""

    claim: Claim
    judgement: Judgement


class Reproduction(NamedTuple):
    """The report's file, and the claims with their verdicts."""

    path: Path
    checked: list[Checked]

    def count(self, verdict: Verdict) -> int:
        """Return how many claims have that verdict."""
        return sum(each.judgement.verdict is verdict for each in self.checked)


def reproduce(folder: Path, progress: Report | None = None) -> Reproduction:
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
    (folder / DATA).write_text(_findings(checked), encoding="utf-8")
    told("done", total, total)
    return Reproduction(path, checked)


def page(findings: Findings, checked: Sequence[Checked], pictures: Sequence[Picture]) -> str:
    """Return the report's text."""
    parts = [
        "# SMDP: the paper, recomputed",
        "<!-- Written by `make reproduce`. -->",
        _wrapped(_INTRODUCTION),
        "## Table I",
        _wrapped(_TABLE_NOTE),
        "\n".join(_table(findings)),
        "## Claims",
        f"{_wrapped(_summary(checked))} {_CLAIMS_NOTE}",
        "\n".join(_claims(checked)),
        "## Figures",
        *(f"{_wrapped(each.caption)}\n\n![{each.caption.partition(':')[0]}]({each.name}.png)" for each in pictures),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(checked: Sequence[Checked]) -> str:
    counts = Counter(each.judgement.verdict for each in checked)
    shares = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    return f"Of {len(checked)} statements, {', '.join(shares)}."


def _table(findings: Findings) -> Iterator[str]:
    found = rows(findings)
    yield "| c_o | " + " | ".join(f"{column.overflow_cost:g}" for column in TABLE) + " |"
    yield "| --- |" + " --- |" * len(TABLE)
    ours = [sweep for sweep, _ in found]
    lines: dict[str, list[tuple[str, str]]] = {
        "least s_max": [(str(a.s_max), str(b.s_max)) for a, b in zip(ours, TABLE, strict=True)],
        "sweeps": [(str(a.iterations), str(b.iterations)) for a, b in zip(ours, TABLE, strict=True)],
        "space": [(str(a.space), str(b.space)) for a, b in zip(ours, TABLE, strict=True)],
        "time": [(f"{a.time:.2e}", f"{b.time:.2e}") for a, b in zip(ours, TABLE, strict=True)],
        "Δ": [(f"{a.delta:.2e}", f"{b.delta:.2e}") for a, b in zip(ours, TABLE, strict=True)],
        "g": [(f"{a.cost:.4f}", f"{b.cost:.4f}") for a, b in zip(ours, TABLE, strict=True)],
    }
    for name, pairs in lines.items():
        yield f"| {name} | " + " | ".join(f"{ours} / {theirs}" for ours, theirs in pairs) + " |"
    yield "| exact s_max | " + " | ".join(str(size) for _, size in found) + " |"


def _claims(checked: Sequence[Checked]) -> Iterator[str]:
    yield "|  | the paper says | where | found |"
    yield "| --- | --- | --- | --- |"
    for number, (claim, judgement) in enumerate(checked, 1):
        verdict = f"{judgement.verdict.value[0].upper()}{judgement.verdict.value[1:]}."
        more = "" if judgement.verdict is Verdict.HELD else f" {claim.limits or judgement.numbers}"
        yield f"| {number} | {claim.says} | {claim.where} | *{verdict}*{more} |"


def _findings(checked: Sequence[Checked]) -> str:
    """Return every claim with its verdict and its numbers, as JSON."""
    listed = [
        {"number": number, "where": claim.where, "claim": claim.says, "verdict": judgement.verdict.value, "numbers": judgement.numbers}
        for number, (claim, judgement) in enumerate(checked, 1)
    ]  # fmt: skip
    return json.dumps(listed, indent=1, ensure_ascii=False) + "\n"


def _wrapped(text: str) -> str:
    return fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
