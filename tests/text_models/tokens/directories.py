"""The tokenizers that are compared with transformers', and the texts, pairs and lists of words that they are given."""

import json
from pathlib import Path

from tests.text_models import tiny, tiny_tokens

TEXTS = [
    "First do it, then do it right!", " leading", "trailing  \n\t double  spaces", "Héllo WÖRLD café", "水は 水水 и мир", "don't can't it's",
    "[SEP] in [MASK] text and </s>", "a" * 150 + " b", "123 4,567.89 $%&", "emoji 😀 zero\u200bwidth", "ﬁ ligature Ⅷ ½", "İstanbul ΣΑΣ", "x", " ",
    "\t", "the quick brown fox jumps over the lazy dog " * 5, "line\nbreak\r\nend", "e\u0301 combining",
]  # fmt: skip
SHORT, LONG = "x y", "a b c d e f g h i j k l m n o p q"
PAIRS = [
    ("first do it", "then do it right"),
    (LONG, SHORT),
    (SHORT, LONG),
    (LONG, LONG),
    (LONG + " r", LONG),
    (LONG, LONG + " r"),
]
WORDS = [["first", "do", "it"], ["Hello", "wonderful", "world!"], ["weirs", "wé"]]
LENGTHS = (7, 12, 13, 1000)


def make(root: Path) -> list[str]:
    """Write the tokenizers' directories into `root` and return their names."""
    for family in tiny.FAMILIES:
        tiny.model(root / family, family)
    for name, cased in (("vocabulary", False), ("vocabulary-cased", True)):
        directory = tiny.model(root / name, tokenizer=False)
        tiny_tokens.write_vocabulary(directory, cased=cased)
        (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
    directory = tiny.model(root / "vocabulary-mpnet", "mpnet")
    known = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    (directory / "vocab.txt").write_text("".join(token + "\n" for token in sorted(known, key=known.get)))
    (directory / "tokenizer.json").unlink()
    for name, space in (("merges", False), ("merges-space", True)):
        directory = tiny.model(root / name, "roberta", tokenizer=False)
        tiny_tokens.write_merges(directory)
        (directory / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": space}))
    for family, settings in (("bert", {"do_lower_case": False}), ("roberta", {"add_prefix_space": True})):
        path = tiny.model(root / f"{family}-overridden", family) / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return sorted(path.name for path in root.iterdir())
