import json
from pathlib import Path

import pytest
from reproduction.__main__ import main
from reproduction.claims import Verdict
from reproduction.figures import PICTURES
from reproduction.published import TABLE
from reproduction.report import CLAIMS, reproduce

from reproduction import claims_accuracy
from reproduction import report as module


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reproduce one column of the table, four claims and one picture only."""
    monkeypatch.setattr(module, "CLAIMS", CLAIMS[:4])
    monkeypatch.setattr(module, "PICTURES", [each for each in PICTURES if each.name == "fig2-3"])
    for each in (claims_accuracy, module):
        monkeypatch.setattr(each, "TABLE", TABLE[2:3])


def test_the_report_has_table_claims_and_pictures(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = reproduce(tmp_path, lambda *what: told.append(what))
    page = found.path.read_text()
    assert "| least s_max | 70 / 70 |" in page
    assert "| exact s_max | 70 |" in page
    assert all(f"| {number} | {claim.says} | {claim.where} |" in page for number, claim in enumerate(CLAIMS[:4], 1))
    assert [one["number"] for one in json.loads((tmp_path / "claims.json").read_text())] == [1, 2, 3, 4]
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
    for name, of in (("PICTURES", [module]), ("TABLE", [claims_accuracy, module])):
        for each in of:
            monkeypatch.setattr(each, name, [])
    main(["-o", str(folder)])
    assert "4 claims: 3 held, 1 held with limits" in capsys.readouterr().out
    assert (folder / "smdp.md").exists()


@pytest.mark.parametrize("arguments", [["other"], ["-o", "no/such/folder"], ["-o", "a-file"]])
def test_what_cannot_be_reproduced_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "reproduction: error: " in capsys.readouterr().err
