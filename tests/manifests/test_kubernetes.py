"""What is written as YAML is read as what it was, by a reader of YAML 1.1 and by one of YAML 1.2."""

from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from weir.manifests.kubernetes import documents

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("-:#?&*!|>'\"%@`{}[],= \n\ty0x1.e_~", max_size=12)
# Readers make a text of surrogates of what no text can have; no setting holds one.
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def read_1_2(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


# What one reader or another takes for something else if it stands without quotes.
AMBIGUOUS = [
    "yes", "NO", "on", "off", "y", "N", "true", "null", "~", "", " a", "a ", "1", "-1", "0x1f", "1_000", "12:30:45", "2026-11-23", "1e3", "1.5", ".5",
    ".inf", "<<", "=", "a: b", "a #b", "#b", "- a", "-", "?", "a:", "{a}", "[a]", "*a", "&a", "!a", "%a", "@a", "`a", "|", ">", "'a'", '"', "\\", "a\nb",
    "a\n", "\n", "a\n\nb\n", "\u2028", "\x85", "\x7f", "\ufeff", "é", "日本", "🎉", "---", "...", "--- a", "--port=8000", "--host=::", "square:Square",
    "a--b", "1Gi", "50m", "key=value", "http://x:9090/a?b=c", "sum(x{a=\"b\"})\n",
]  # fmt: skip


@example([{text: [text, {text: text}] for text in AMBIGUOUS}])
@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_what_is_written_is_read_back(objects: list[Any]) -> None:
    assert list(yaml.safe_load_all(documents(objects))) == objects
    assert [read_1_2(documents([each])) for each in objects] == objects
