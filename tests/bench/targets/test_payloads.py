from pathlib import Path

import pytest

from weir.bench.targets.payloads import decode_items, read_payloads
from weir.errors import SettingsError


def test_data_is_the_body_itself_or_a_file_or_the_lines_of_one(tmp_path: Path) -> None:
    whole, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    whole.write_text("[1,\n2]\n")
    lines.write_text('1\n\n"two"\n{"three": 3}\n')
    assert read_payloads("3") == [b"3"]
    assert read_payloads(f"@{whole}") == [b"[1,\n2]\n"]
    assert read_payloads(f"@{lines}") == [b"1", b'"two"', b'{"three": 3}']
    assert read_payloads([1, "two"]) == [b"1", b'"two"']
    assert decode_items([b"1", b'"two"']) == [1, "two"]


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ndjson"
    empty.write_text("\n")
    for data, wrong in (
        (f"@{empty}", "must have at least one value"), ("@nowhere.json", "cannot be read: No such file"),
        ([], "must have at least one value"), ([object()], "data: .*object"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=wrong):
            read_payloads(data)
    with pytest.raises(SettingsError, match="must be JSON for a model in this process"):
        decode_items([b"three"])
