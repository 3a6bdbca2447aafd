"""What sentence-transformers adds to a model: pooling, dense layers, normalisation, lengths, prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text_models import tiny
from tests.text_models.opening import results

from weir.errors import SettingsError
from weir.text_models import Pooling, TextSettings
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.recipe import chosen_recipe
from weir.text_models.texts import TokenizerOptions, TokenRule

TODAY = {
    "cls": Pooling.CLS, "max": Pooling.MAX, "mean": Pooling.MEAN, "mean_sqrt_len_tokens": Pooling.MEAN_SQRT,
    "weightedmean": Pooling.WEIGHTED_MEAN, "lasttoken": Pooling.SEP,
}  # fmt: skip
OLD = {
    name: f"pooling_mode_{name}" + ("" if name == "lasttoken" else "_token" if name == "cls" else "_tokens")
    for name in TODAY
}
OLD["mean_sqrt_len_tokens"] = "pooling_mode_mean_sqrt_len_tokens"
OTHERS = "config_sentence_transformers.json"


def change(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    now = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in now.items() if value is not None}))


@pytest.mark.parametrize("name", TODAY)
def test_poolings_of_today_and_switches_of_older_files(name: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, pooling=name, normalize=False))
    assert (checkpoint.poolings, checkpoint.normalize) == ((TODAY[name],), False)
    for switches, expected in (({OLD[other]: other == name for other in OLD}, TODAY[name]), ({}, Pooling.MEAN)):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | switches))
        assert read_checkpoint(tmp_path).poolings == (expected,)


def test_several_poolings_are_joined_as_they_stand(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, pooling=["mean", "cls"]))
    assert checkpoint.poolings == (Pooling.MEAN, Pooling.CLS)


def test_lengths_are_the_smallest_that_is_declared(tmp_path: Path) -> None:
    for said, expected in ((None, 64), (40, 40), (1000, 64)):
        assert read_checkpoint(tiny.sentence_model(tmp_path, "roberta", max_length=said)).max_length == expected
    change(tmp_path / "sentence_bert_config.json", max_seq_length=None)
    change(tmp_path / "tokenizer_config.json", model_max_length=20)
    assert read_checkpoint(tmp_path).max_length == 20
    change(tmp_path / "tokenizer_config.json", model_max_length=10**30)
    assert read_checkpoint(tmp_path).max_length == 64


def test_prompts(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, prompts={"query": "query: ", "passage": "passage: "}))
    assert checkpoint.prompts == {"query": "query: ", "passage": "passage: "}
    assert checkpoint.layout.default_prompt is None
    change(tmp_path / OTHERS, default_prompt_name="query")
    prompted = read_checkpoint(tmp_path)
    assert prompted.layout.default_prompt == "query"
    given = [prompted.tokenizer(), checkpoint.tokenizer(TokenizerOptions(prompt="query: "))]
    without = [checkpoint.tokenizer(), prompted.tokenizer(TokenizerOptions(prompt=""))]
    for tokenizer in given:
        texts = tokenizer.encode(["do it", ("do", "it"), ["do", "it"]], TokenRule(64))
        assert texts == without[0].encode(["query: do it", ("do", "it"), ["do", "it"]], TokenRule(64))
    assert without[0].encode(["do it"], TokenRule(64)) == without[1].encode(["do it"], TokenRule(64))
    change(tmp_path / OTHERS, default_prompt_name="question")
    with pytest.raises(SettingsError, match="default_prompt_name='question': must be one of query, passage"):
        read_checkpoint(tmp_path)


def routed(directory: Path, **config: Any) -> Path:
    """Write a model with a Router of dense layers behind the pooling, of 20 numbers for documents and none for queries."""
    tiny.sentence_model(directory, dense=20)
    router = directory / "2_Router"
    router.mkdir()
    (directory / "2_Dense").rename(router / "document_0_Dense")
    (router / "query_0_Normalize").mkdir()
    kinds = {"document_0_Dense": "Dense", "query_0_Normalize": "Normalize"}
    types = {name: f"sentence_transformers.models.{kind}" for name, kind in kinds.items()}
    structure = {"query": ["query_0_Normalize"], "document": ["document_0_Dense"]}
    stated = {"types": types, "structure": structure, "parameters": {"default_route": "document"}, **config}
    (router / "router_config.json").write_text(json.dumps(stated))
    modules = json.loads((directory / "modules.json").read_text())
    modules[2] |= {"path": "2_Router", "type": "sentence_transformers.models.Router"}
    (directory / "modules.json").write_text(json.dumps(modules[:3]))
    return directory


def test_one_route_of_a_router_is_served(tmp_path: Path) -> None:
    model = routed(tmp_path / "model")
    document, query = (read_checkpoint(model, router=route) for route in (None, "query"))
    assert [len(layer.weight) for layer in document.dense] == [20] and not document.normalize
    assert not query.dense and query.normalize
    assert document.content_hash() != query.content_hash()
    vectors = [results(model, ["do it"], tmp_path, router=route)[0] for route in (None, "document", "query")]
    assert [len(vector) for vector in vectors] == [20, 20, 32]
    assert (vectors[0] == vectors[1]).all()


def test_a_route_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"router='image': .*router_config.json: must be one of query, document"):
        read_checkpoint(routed(tmp_path / "model"), router="image")
    with pytest.raises(SettingsError, match=r"must name the types and the structure of its routes"):
        read_checkpoint(routed(tmp_path / "typeless", types={}))
    outside = {"document": ["../document"]}
    types = {"../document": "sentence_transformers.models.Dense"}
    with pytest.raises(SettingsError, match=r"'../document' must be a folder in that directory"):
        read_checkpoint(routed(tmp_path / "outside", structure=outside, types=types))
    with pytest.raises(SettingsError, match=r"router='query': .*modules.json: has no module Router"):
        read_checkpoint(tiny.sentence_model(tmp_path / "plain"), router="query")


def test_the_files_say_how_vectors_are_compared(tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path)
    assert read_checkpoint(tmp_path).layout.similarity == "cosine"
    change(tmp_path / OTHERS, similarity_fn_name="dot")
    assert read_checkpoint(tmp_path).layout.similarity == "dot"
    change(tmp_path / OTHERS, similarity_fn_name="angle")
    rule = "similarity_fn_name='angle': must be one of cosine, dot, euclidean, manhattan"
    with pytest.raises(SettingsError, match=rule):
        read_checkpoint(tmp_path)


def test_vectors_are_as_long_as_the_files_say(tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path, pooling="mean")
    change(tmp_path / OTHERS, truncate_dim=16)
    checkpoint = read_checkpoint(tmp_path)
    for options, expected in (
        (TextSettings(), 16),
        (TextSettings(pooling="REDUCE_MEAN", layers=[-1]), 16),
        (TextSettings(dimensions=20), 20),  # the user's word counts
        (TextSettings(pooling="cls"), None),  # a vector that the files say nothing of
        (TextSettings(layers=[-1, -2]), None),
    ):
        assert chosen_recipe(checkpoint, options).dimensions == expected
    change(tmp_path / OTHERS, truncate_dim=1000)
    assert chosen_recipe(read_checkpoint(tmp_path)).dimensions == 32
    change(tmp_path / OTHERS, truncate_dim=0)
    with pytest.raises(SettingsError, match="truncate_dim=0: must be a whole number of at least 1"):
        read_checkpoint(tmp_path)


def test_dense_layers(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, dense=16))
    (layer,) = checkpoint.dense
    assert (layer.weight.shape, layer.bias is not None, layer.activation) == ((16, 32), True, "tanh")
    assert checkpoint.normalize
    tiny.sentence_model(tmp_path, dense=16, pooling=["cls", "mean"])
    with pytest.raises(SettingsError, match="a dense layer takes vectors of 32 numbers, but gets vectors of 64"):
        read_checkpoint(tmp_path)


def test_the_network_in_a_folder_of_its_own(tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path)
    (tmp_path / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"):
        (tmp_path / name).rename(tmp_path / "0_Transformer" / name)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0] |= {"path": "0_Transformer", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.poolings == (Pooling.MEAN,)
    assert checkpoint.tokenizer().cls_id == 2


def test_texts_that_the_model_wants_in_lower_case(tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path, "roberta")
    plain = read_checkpoint(tmp_path).tokenizer()
    change(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    lower = read_checkpoint(tmp_path).tokenizer()
    same, loud = (plain.encode([text], TokenRule(64)) for text in ("do it", "DO IT"))
    assert lower.encode(["DO IT"], TokenRule(64)) == same != loud


@pytest.mark.parametrize(
    ("file", "values", "rule"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode='median': must be one or several of cls, max"),
        ("1_Pooling/config.json", {"pooling_mode": []}, r"pooling_mode=\[\]: must be one or several"),
        ("1_Pooling/config.json", {"pooling_mode": None, "pooling_mode_median_tokens": True}, "pooling_mode_median_tokens=True: is unknown: must be one or several of pooling_mode_cls"),
        ("1_Pooling/config.json", {"pooling_mode": None, "pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens=False: is off, as all others are: one of pooling_mode_cls"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt=False: must be true"),
        ("2_Dense/config.json", {"activation_function": "mine.Own"}, "activation_function='mine.Own': must be torch's Identity"),
        ("2_Dense/config.json", {"out_features": 8}, r"must hold 'linear.weight' of the shape \[8, 32\]"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 48}, "pools vectors of 48 numbers, must be 32"),
        ("1_Pooling/config.json", {"embedding_dimension": 16}, "pools vectors of 16 numbers, must be 32"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "must be sentence_embedding"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length='long': must be a whole number of at least 3"),
        (OTHERS, {"prompts": [1]}, "prompts must be texts by name"),
    ],
)  # fmt: skip
def test_settings_that_are_not_understood(file: str, values: dict[str, Any], rule: str, tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path, dense=16)
    change(tmp_path / file, **values)
    with pytest.raises(SettingsError, match=rule) as caught:
        read_checkpoint(tmp_path)
    assert str(tmp_path / file.split("/")[0]) in caught.value.message


@pytest.mark.parametrize(
    ("kinds", "rule"),
    [
        (["Transformer", "Pooling", "Normalize", "Dense"], "the module Dense: must not come behind a Normalize"),
        (["Transformer", "LSTM", "Pooling"], "the module LSTM: must be Transformer, Pooling, Dense or Normalize"),
        (["BoW"], "the module BoW: must begin with a Transformer or a StaticEmbedding"),
        (["Transformer"], "the module Transformer: must be followed by a Pooling"),
        ([], "names no modules"),
    ],
)
def test_modules_that_are_not_computed(kinds: list[str], rule: str, tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path, dense=16)
    folders = {"Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [{"path": folders.get(kind, ""), "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SettingsError, match=rule):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "modules",
    [[{"path": "../up", "type": "a.Transformer"}], [{"path": "/etc", "type": "a.Transformer"}], [{}], {}, [3]],
)
def test_lists_of_modules_that_are_none(modules: Any, tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SettingsError, match=r"modules\.json"):
        read_checkpoint(tmp_path)
