"""The torch runtime gives what the onnx runtime gives, on each architecture and pooling; and serves what only transformers knows."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.graph.test_heads import m3
from tests.text_models.opening import results
from tests.text_models.runtime.references import WITH_TORCH

import weir
from weir.errors import SettingsError
from weir.text_models import WITH_HEAD, ComputingSettings, Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint, read_for
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.recipe import chosen_recipe
from weir.text_models.runtime import Inputs, Runtime, open_runtime

pytestmark = WITH_TORCH
TORCH = ComputingSettings(runtime="torch")


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("model"), request.param, labels=3)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.sentence_model(tmp_path_factory.mktemp("bert"), "bert", dense=20, labels=3, residual=True)


def inputs(vocabulary: int, pad_id: int, *, mask_special: bool = False, hide_special: bool = False) -> Inputs:
    chance = np.random.default_rng(5)
    texts = [
        TokenIds(chance.integers(5, vocabulary, count).astype(np.int32), second)
        for count, second in [(7, 0), (12, 5), (3, 0)]
    ]
    return padded_inputs(texts, pad_id=pad_id, mask_special=mask_special, hide_special=hide_special)


def both(directory: Path, recipe: Recipe, cache: Path) -> tuple[Runtime, Runtime]:
    torch, onnx = (
        open_runtime(read_checkpoint(directory), recipe, ComputingSettings(runtime=kind, cache=str(cache)))
        for kind in ("torch", "onnx")
    )
    return torch, onnx


def cosine(one: Any, other: Any) -> float:
    """Return the smallest cosine between vectors of the same place, but for those that are zeros in both."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype == np.float32
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    cosines = np.where(lengths > 0, (one * other).sum(axis=-1) / np.maximum(lengths, 1e-30), 1.0)
    return float(cosines.min())


@pytest.mark.parametrize("pooling", [pooling for pooling in Pooling if pooling not in (*WITH_HEAD, Pooling.PROJECTION)])
def test_both_runtimes_give_the_same(directory: Path, tmp_path: Path, pooling: Pooling) -> None:
    architecture = read_checkpoint(directory).architecture
    if pooling is Pooling.POOLER and not architecture.has_pooler:
        pytest.skip("this architecture has no pooler")
    torch, onnx = both(directory, Recipe(pooling, layers=(-1, -2), mask_special=True), tmp_path)
    assert torch.dimensions == onnx.dimensions
    given = inputs(architecture.vocab_size, architecture.pad_id, mask_special=True)
    vectors = torch.run(given)[0]
    assert vectors.shape[-1] == torch.dimensions
    assert cosine(vectors, onnx.run(given)[0]) > 0.99999
    assert np.allclose(vectors, onnx.run(given)[0], atol=1e-4)


@pytest.mark.parametrize("pooling", WITH_HEAD)
def test_heads_alone_are_refused(directory: Path, pooling: Pooling) -> None:
    with pytest.raises(SettingsError, match=f"pooling='{pooling.value}': the onnx runtime alone computes it"):
        open_runtime(read_checkpoint(directory), Recipe(pooling), TORCH)


def test_both_make_the_same_of_a_text_beside_its_vector(tmp_path: Path) -> None:
    checkpoint, _ = m3(tmp_path / "model")
    recipe, cache = chosen_recipe(checkpoint), tmp_path / "cache"
    given = inputs(checkpoint.architecture.vocab_size, checkpoint.architecture.pad_id)
    wanted = [recipe.pooling, *recipe.further]
    assert wanted == [Pooling.CLS, Pooling.SPARSE, Pooling.TOKENS]
    torch, onnx = (
        open_runtime(checkpoint, recipe, ComputingSettings(runtime=kind, cache=str(cache))).run(given, wanted)
        for kind in ("torch", "onnx")
    )
    for one, other in zip(torch, onnx, strict=True):
        kept = given.mask > 0 if one.ndim == 3 else slice(None)
        assert np.allclose(one[kept], other[kept], atol=1e-4)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.MAX, Pooling.MEAN_MAX, Pooling.HIERARCHICAL])
def test_what_no_token_attends_to_is_hidden_from_both(directory: Path, tmp_path: Path, pooling: Pooling) -> None:
    architecture = read_checkpoint(directory).architecture
    torch, onnx = both(directory, Recipe(pooling, layers=(-2,), mask_special=True), tmp_path)
    given = inputs(architecture.vocab_size, architecture.pad_id, mask_special=True, hide_special=True)
    seen = inputs(architecture.vocab_size, architecture.pad_id, mask_special=True)
    vectors = torch.run(given)[0]
    assert np.allclose(vectors, onnx.run(given)[0], atol=1e-4)
    assert cosine(vectors, torch.run(seen)[0]) < 0.9999


def test_padding_that_is_written_out_counts_as_in_sentence_transformers(directory: Path, tmp_path: Path) -> None:
    import sentence_transformers

    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny.sentence_files(tmp_path)
    texts = ["do it <pad> right", "<pad>", "do <pad><pad> [PAD] it, then do it better"]
    wanted = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    for runtime in ("torch", "onnx"):
        vectors = np.stack(results(tmp_path, texts, runtime=runtime))
        assert cosine(vectors, wanted) > 0.999999, runtime


def test_several_poolings_are_joined(tmp_path: Path) -> None:
    plain = tiny.model(tmp_path / "plain")
    torch, onnx = both(plain, Recipe(Pooling.HIERARCHICAL, joined=(Pooling.MAX,), window=3), tmp_path)
    given = inputs(read_checkpoint(plain).architecture.vocab_size, 0)
    assert np.allclose(torch.run(given)[0], onnx.run(given)[0], atol=1e-4)


def test_places_can_be_left_out(directory: Path, tmp_path: Path) -> None:
    architecture = read_checkpoint(directory).architecture
    torch, onnx = both(directory, Recipe(Pooling.MEAN, positions=False), tmp_path)
    given = inputs(architecture.vocab_size, architecture.pad_id)
    assert cosine(torch.run(given)[0], onnx.run(given)[0]) > 0.99999


def test_what_comes_behind_the_pooling_is_the_same(bert: Path, tmp_path: Path) -> None:
    torch, onnx = both(bert, Recipe(Pooling.MEAN, normalize=True, dimensions=7), tmp_path)
    given = inputs(read_checkpoint(bert).architecture.vocab_size, 0)
    assert torch.run(given)[0].shape == (3, 7)
    assert np.allclose(torch.run(given)[0], onnx.run(given)[0], atol=1e-5)


@pytest.mark.parametrize(("precision", "least"), [(Precision.FP16, 0.999), (Precision.BF16, 0.99)])
def test_half_precision_is_near(bert: Path, precision: Precision, least: float) -> None:
    checkpoint, recipe = read_checkpoint(bert), Recipe(Pooling.MEAN)
    given = inputs(checkpoint.architecture.vocab_size, 0)
    half = open_runtime(checkpoint, dataclasses.replace(recipe, precision=precision), TORCH)
    assert cosine(half.run(given)[0], open_runtime(checkpoint, recipe, TORCH).run(given)[0]) > least


def test_eight_bits_are_refused(bert: Path) -> None:
    with pytest.raises(SettingsError, match="fp32, fp16 and bf16"):
        open_runtime(read_checkpoint(bert), Recipe(Pooling.MEAN, precision=Precision.INT8), TORCH)


@pytest.mark.timeout(600)  # a C++ compiler has to be done
def test_a_compiled_model_gives_the_same(bert: Path) -> None:
    import torch

    checkpoint, recipe = read_checkpoint(bert), Recipe(Pooling.MEAN)
    given = inputs(checkpoint.architecture.vocab_size, 0)
    try:
        compiled = open_runtime(checkpoint, recipe, ComputingSettings(runtime="torch", compile=True)).run(given)[0]
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"there is no compiler: {error}")
    assert cosine(compiled, open_runtime(checkpoint, recipe, TORCH).run(given)[0]) > 0.99999


def test_an_architecture_that_only_transformers_knows(tmp_path: Path) -> None:
    ernie(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ernie"
    with pytest.raises(SettingsError, match="--runtime torch"):
        read_checkpoint(tmp_path)
    assert read_for(tmp_path, TORCH).max_length == 64  # the tokenizer's: there are 200 positions
    vectors = results(tmp_path, ["so sunny", "the weather"], runtime="torch", pooling="cls", layers=[-1, -2])
    assert [vector.shape for vector in vectors] == [(64,), (64,)]


def test_a_model_that_brings_its_own_code_is_refused(bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    auto_map = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    tiny.change(tmp_path / "config.json", model_type="mine", auto_map=auto_map)
    (tmp_path / "mine.py").write_text("raise SystemExit('this was run')")
    (tmp_path / "modules.json").unlink()
    with pytest.raises(SettingsError, match="transformers does not read it"):
        open_runtime(read_for(tmp_path, TORCH), Recipe(Pooling.MEAN), TORCH)


def written(directory: Path, kind: str, **more: Any) -> Path:
    """Write a small random model of a class of transformers."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vocabulary = tiny_tokens.write(directory, "bert")
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, max_position_embeddings=200, **sizes, **more)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(directory)
    return directory


def ernie(directory: Path) -> Path:
    return written(directory, "Ernie")


def qwen(directory: Path) -> Path:
    """Write a decoder that is made into a sentence encoder: the last token's vector, normalized."""
    return written(directory, "Qwen3", num_key_value_heads=2, head_dim=8)


def roberta(directory: Path) -> Path:
    return tiny.model(directory, "roberta")


TEXTS = ["so sunny", "the weather " * 4, "First do it, then do it right, then do it better. " * 12]


# Without a bound it fails on RoBERTa itself: it counts two positions more than there are.
@pytest.mark.parametrize(("write", "longest"), [(qwen, 12), (qwen, None), (ernie, 12), (ernie, None), (roberta, 12)])
def test_long_texts_are_cut_where_sentence_transformers_cuts_them(
    tmp_path: Path, write: Any, longest: int | None
) -> None:
    import sentence_transformers

    write(tmp_path)
    tiny.change(tmp_path / "tokenizer_config.json", model_max_length=longest or 10**30)
    tiny.sentence_files(tmp_path, pooling="lasttoken", truncate_dim=16)
    wanted = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    vectors = np.stack(results(tmp_path, TEXTS, runtime="torch"))
    assert vectors.shape == (3, 16)
    assert cosine(vectors, wanted) > 0.99999
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)  # theirs are shorter: they are cut last


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_weights_that_are_no_numbers(number: float, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path)
    weights = {name: np.array(value) for name, value in open_tensors(directory / "model.safetensors").items()}
    weights["embeddings.word_embeddings.weight"][7, 5] = number
    tiny.save(directory / "model.safetensors", weights)
    checkpoint = read_for(directory, TORCH)
    rule = "'embeddings.word_embeddings.weight' has a weight that is NaN or infinite"
    with pytest.raises(SettingsError, match=rule):
        open_runtime(checkpoint, chosen_recipe(checkpoint), TORCH)


@pytest.mark.parametrize("opens", ["a text model", "another model"])
def test_attention_makes_no_plan_for_each_shape(bert: Path, opens: str) -> None:
    """On a GPU the first batch of each shape would take some 50 ms. The switch is there on the CPU, too."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(True)
    if opens == "a text model":
        open_runtime(read_checkpoint(bert), Recipe(Pooling.MEAN), TORCH)
    else:
        weir.Model().torch_device("cpu")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
