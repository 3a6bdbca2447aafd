"""What is served of a directory that nothing is said about: the pooling that sentence-transformers chooses, in a line that says why."""

from pathlib import Path
from typing import Any

import pytest
from tests.text_models import tiny
from tests.text_models.graph.test_heads import modules

from weir.errors import SettingsError
from weir.text_models import Pooling, TextSettings
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.recipe import chosen_recipe, used_layers
from weir.text_server.text_model import described

BARE = "its files state no pooling, which --pooling and --layers choose"


def decoder(directory: Path, name: str = "Qwen3ForCausalLM", **more: Any) -> Path:
    """Write a decoder whose vocabulary has yes and no."""
    return tiny.answering(tiny.model(directory, "qwen3", architectures=[name], max_position_embeddings=1024, **more))


def said(checkpoint: Checkpoint, **settings: Any) -> tuple[Pooling, tuple[int, ...], str]:
    text = TextSettings(**settings)
    recipe = chosen_recipe(checkpoint, text)
    return recipe.pooling, recipe.layers, described(checkpoint, recipe, text)


def test_a_directory_without_modules_is_pooled_as_by_sentence_transformers(tmp_path: Path) -> None:
    bert = read_checkpoint(tiny.model(tmp_path / "bert"))
    line = f"pools the last layer by mean, as sentence-transformers does: {BARE}"
    assert said(bert) == (Pooling.MEAN, (-1,), line)
    assert said(bert, bare_layer=-2)[1:] == (
        (-2,),
        f"pools layers -2 by mean, as --bare-layer or --layers states: {BARE}",
    )
    assert said(bert, pooling="max", layers=[-1, -2])[2] == "pools layers -1, -2 by max, as --pooling states"
    one = read_checkpoint(tiny.model(tmp_path / "one", layers=1))
    for options in ({}, {"layers": [-1]}, {"bare_layer": -2}):
        assert said(one, **options) == (Pooling.MEAN, (-1,), line)
    with pytest.raises(SettingsError, match="layers: -2: must be -1: the model has 1 layer"):
        used_layers(one.architecture, chosen_recipe(one, TextSettings(layers=[-2])))
    own = read_checkpoint(tiny.sentence_model(tmp_path / "own", pooling="cls"))
    assert said(own, bare_layer=-2) == (Pooling.CLS, (-1,), "pools the last layer by cls, as its modules.json states")
    labels = read_checkpoint(tiny.model(tmp_path / "labels", labels=1))
    assert said(labels)[2] == "serves the logits of its head, as its files state"


def test_of_a_language_model_the_last_token_is_pooled(tmp_path: Path) -> None:
    for name, causal in (("Qwen3ForCausalLM", True), ("Qwen3Model", True), ("Qwen3ForCausalLM", False)):
        found, _, line = said(read_checkpoint(decoder(tmp_path / f"{name}-{causal}", name, is_causal=causal)))
        is_language_model = causal and name == "Qwen3ForCausalLM"
        assert found is (Pooling.SEP if is_language_model else Pooling.MEAN)
        assert ("if it is a reranker, --pooling yes-no scores pairs" in line) == is_language_model


@pytest.mark.parametrize("place", ["Qwen3-Reranker-0.6B", "models--Qwen--Qwen3-Reranker-0.6B/snapshots/0a1b"])
def test_a_language_model_that_is_called_a_reranker_says_yes_or_no(place: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(decoder(tmp_path / place))
    assert said(checkpoint)[0] is Pooling.YES_NO
    assert "a reranker that is a language model answers; --pooling sep makes vectors" in said(checkpoint)[2]
    assert said(checkpoint, pooling="sep")[0] is Pooling.SEP
    with_modules = tiny.sentence_files(decoder(tmp_path / "other" / place), pooling="lasttoken")
    assert said(read_checkpoint(with_modules))[0] is Pooling.SEP


@pytest.mark.parametrize("right", [True, False])
def test_a_module_may_state_which_tokens_say_yes_and_no(right: bool, tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    words = read_checkpoint(directory).tokenizer().vocabulary
    ids = {"true_token_id": words["yes" if right else "it"], "false_token_id": words["no"]}
    kinds = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    )
    modules(directory, ("", kinds[0]), ("1_LogitScore", kinds[1]), at_1_LogitScore=ids)
    checkpoint = read_checkpoint(directory)
    assert said(checkpoint)[::2] == (Pooling.YES_NO, "serves the yes-no of its head, as its modules.json states")
    if right:
        assert checkpoint.answers.weight.shape == (1, 32)
    else:
        with pytest.raises(SettingsError, match="must be those of yes and no"):
            _ = checkpoint.answers
