import sys

import pytest

from weir.cli import main


@pytest.mark.parametrize("arguments", [[], ["smdp"], ["smdp", "-o", "folder"]])
def test_the_command_says_where_it_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weir", "reproduce", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "weir: weir reproduce has moved: run `make reproduce` in a checkout of Weir\n"
