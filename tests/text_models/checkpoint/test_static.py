"""Tables with a vector for each token: StaticEmbedding of sentence-transformers, and model2vec. A text gets the mean of those of its tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.text_models import tiny_tokens
from tests.text_models.graph.running import cosines
from tests.text_models.graph.test_heads import modules
from tests.text_models.opening import results

from weir.errors import SettingsError
from weir.text_models.checkpoint.reading import read_checkpoint

TEXTS = ["First do it", "then do it right, then do it better. " * 30, "do"]
random = np.random.default_rng(5)


def static(directory: Path, folder: str = "0_StaticEmbedding", **arrays: Any) -> Path:
    """Write a model of sentence-transformers with a StaticEmbedding and a Normalize."""
    (directory / folder).mkdir(parents=True, exist_ok=True)
    tiny_tokens.write(directory / folder, "bert")
    save_file(arrays, directory / folder / "model.safetensors")
    named = ((folder, "StaticEmbedding"), ("1_Normalize", "Normalize"))
    return modules(directory, *((path, f"sentence_transformers.models.{kind}") for path, kind in named))


def expected(directory: Path, table: Any) -> Any:
    tokenizer = read_checkpoint(directory).tokenizer()
    means = [table[tokenizer.backend.encode(text, add_special_tokens=False).ids].mean(axis=0) for text in TEXTS]
    return np.stack([mean / np.linalg.norm(mean) for mean in means])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", ["embedding.weight", "embeddings"])
def test_the_mean_of_the_vectors_of_tokens(name: str, dtype: Any, tmp_path: Path) -> None:
    table = random.normal(size=(tiny_tokens.size("bert"), 24)).astype(dtype)
    arrays: dict[str, Any] = {name: table}
    directory = static(tmp_path, **arrays)
    found = np.stack(results(directory, TEXTS))
    assert found.shape == (3, 24)
    assert cosines(found, expected(directory, table.astype(np.float32))).min() > 0.99999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_model2vec_may_share_rows_and_weigh_tokens(tmp_path: Path) -> None:
    count = tiny_tokens.size("bert")
    rows = random.normal(size=(20, 24)).astype(np.float32)
    mapping, weights = random.integers(0, 20, count), random.random(count)
    directory = static(tmp_path, "", embeddings=rows, mapping=mapping, weights=weights)
    found = np.stack(results(directory, TEXTS))
    assert cosines(found, expected(directory, rows[mapping] * weights[:, None])).min() > 0.99999
    (directory / "modules.json").unlink()
    (directory / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": False}))
    bare = np.stack(results(directory, TEXTS))
    assert cosines(bare, found).min() > 0.99999
    assert np.abs(np.linalg.norm(bare, axis=1) - 1).max() > 0.01


@pytest.mark.parametrize(
    ("arrays", "rule"),
    [
        ({"table": np.zeros((5, 4), np.float32)}, "must hold a table of floating-point numbers called 'embedding.weight' or 'embeddings'"),
        ({"embeddings": np.zeros((5, 4), np.int8)}, "must hold a table of floating-point numbers"),
        ({"embeddings": np.zeros((5, 4), np.float32), "mapping": np.array([0, 5])}, "'mapping' must name rows of 'embeddings', which has 5"),
        ({"embeddings": np.zeros((5, 4), np.float32), "weights": np.zeros(4)}, "'weights' has 4 numbers, there are 5 tokens"),
        ({"embeddings": np.full((5, 4), np.nan, np.float32)}, "'embeddings' has a weight that is NaN or infinite"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(arrays: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rule.replace("(", r"\(")):
        read_checkpoint(static(tmp_path, **arrays))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="they are of different models"):
        read_checkpoint(static(tmp_path, embeddings=np.zeros((5, 4), np.float32))).tokenizer()
