"""Files of text that users write may begin with a byte order mark, as editors on Windows write one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weir.bench.target import read_payloads
from weir.catalog.repository.folder import read_file
from weir.policy.cost import Profile, read_profile
from weir.profiling import read_items
from weir.protocols.access import Control, ControlSettings, read_keys
from weir.settings import read_settings
from weir.simulation.arrivals import read_trace
from weir.text_models.offline import read_texts

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=1.0, max_batch_size=2).to_toml()
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weir.toml": ("port = 3\n", lambda path: read_settings(["m:A"], {}, {}, str(path)).http),
    "config.toml": ('target = "m:A"\n', lambda path: read_file(path.parent, "m")),
    "config.pbtxt": ('backend: "onnxruntime"\n', lambda path: read_file(path.parent, "m")),
    "profile.toml": (PROFILE, lambda path: read_profile(path).to_toml()),
    "items.jsonl": ("[1]\n[2]\n", read_items),
    "items.json": ("[[1], [2]]", read_items),
    "bodies.jsonl": ("[1]\n[2]\n", lambda path: read_payloads(f"@{path}")),
    "texts.jsonl": ('"good"\n"bad"\n', read_texts),
    "texts.csv": ("text,label\ngood,1\n", read_texts),
    "trace.csv": ("arrival_s\n0\n1\n", lambda path: [each.tolist() for each in read_trace(path)]),
    "keys": ("one\ntwo\n", lambda path: read_keys(str(path))),
    "token": ("secret\n", lambda path: Control(ControlSettings(control_token_file=str(path))).knows("secret")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_at_the_head_of_a_file_is_not_part_of_it(name: str, tmp_path: Path) -> None:
    content, read = READERS[name]
    path = tmp_path / name
    path.write_text(content, "utf-8")
    expected = read(path)
    path.write_text(content, "utf-8-sig")
    assert read(path) == expected
    assert expected
