import sys
from pathlib import Path

import pytest

from weir.cli import main
from weir.simulation import reproduce as module
from weir.simulation.paper import claims_accuracy, report
from weir.simulation.paper.claims import Verdict
from weir.simulation.paper.figures import PICTURES
from weir.simulation.paper.published import TABLE
from weir.simulation.reproduce import CLAIMS, reproduce


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduce one column of the table, four claims and one picture only."""
    monkeypatch.setattr(module, "CLAIMS", CLAIMS[:4])
    monkeypatch.setattr(module, "PICTURES", [each for each in PICTURES if each.name == "fig2-3"])
    for each in (claims_accuracy, report):
        monkeypatch.setattr(each, "TABLE", TABLE[2:3])


def test_the_report_has_table_claims_and_pictures(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = reproduce(tmp_path, lambda *what: told.append(what))
    page = found.path.read_text()
    assert "| least s_max | 70 / 70 |" in page
    assert "| exact s_max | 70 |" in page
    assert all(f"**{number}. {claim.says}**" in " ".join(page.split()) for number, claim in enumerate(CLAIMS[:4], 1))
    assert "![Fig. 2 and 3](fig2-3.png)" in page
    assert (tmp_path / "fig2-3.png").stat().st_size < 150_000
    assert (tmp_path / "fig2-3.svg").exists()
    assert all(len(line) <= 160 for line in page.splitlines() if not line.startswith(("|", "!")))
    assert told[-1] == ("done", 5, 5)
    assert sum(found.count(verdict) for verdict in Verdict) == 4


def test_the_command_writes_the_same_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "paper"
    monkeypatch.setattr(module, "PICTURES", [])
    monkeypatch.setattr(sys, "argv", ["weir", "reproduce", "smdp", "-o", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "4 claims: 3 held, 1 held with limits" in said
    assert (folder / "smdp.md").exists()


@pytest.mark.parametrize("arguments", [["other"], ["smdp", "-o", "no/such/folder"]])
def test_what_cannot_be_reproduced_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weir", "reproduce", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("weir: ")
