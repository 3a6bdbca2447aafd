"""Write expected.json: what transformers' tokenizers make of the texts in directories.py.

Needs transformers (5.23 made the file): `python -m tests.text_models.tokens.make_reference`.
"""

import json
import tempfile
from pathlib import Path

from tests.text_models.tokens.directories import LENGTHS, PAIRS, TEXTS, WORDS, make
from transformers import AutoTokenizer


def main() -> None:
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in make(Path(folder)):
            directory = str(Path(folder) / name)
            cut = AutoTokenizer.from_pretrained(directory)
            # Bytes of words begin with those of a space, which it has to be told.
            spaced = AutoTokenizer.from_pretrained(directory, add_prefix_space=True)
            expected[name] = {
                "texts": {
                    length: [cut(text, truncation=True, max_length=length)["input_ids"] for text in TEXTS]
                    for length in LENGTHS
                },
                "pairs": {
                    length: [cut(*pair, truncation=True, max_length=length)["input_ids"] for pair in PAIRS]
                    for length in LENGTHS
                },
                "types": [cut(*pair).get("token_type_ids") for pair in PAIRS],
                "words": [spaced(words, is_split_into_words=True)["input_ids"] for words in WORDS],
                "bare": [cut(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
            }
    (Path(__file__).parent / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
