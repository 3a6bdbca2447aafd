"""Write late.npz: the vectors of PyLate for tiny models. Run it where PyLate is installed: python -m tests.text_models.late_make_reference"""

import tempfile
from pathlib import Path

import numpy as np
from pylate import models
from tests.text_models.late_models import CASES, DOCUMENTS, QUERIES, pylate

found = {}
for name, settings in CASES.items():
    with tempfile.TemporaryDirectory() as folder:
        model = models.ColBERT(str(pylate(Path(folder), name.partition(",")[0], **settings)), device="cpu")
        for kind, texts in (("query", QUERIES), ("document", DOCUMENTS)):
            prompt = kind if settings.get("prompts") else None
            vectors = [model.encode([text], is_query=kind == "query", prompt_name=prompt)[0] for text in texts]
            found[f"{name}, {kind}"] = np.concatenate(vectors).astype(np.float32)
            found[f"{name}, {kind}, counts"] = np.array([len(each) for each in vectors])
np.savez_compressed(Path(__file__).parent / "late.npz", **found)
