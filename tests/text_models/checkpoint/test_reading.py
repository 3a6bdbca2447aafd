"""Directories of each family are understood."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny
from tests.text_models.opening import results

from weir.errors import SettingsError
from weir.text_models import ComputingSettings, Pooling, Recipe, TextSettings
from weir.text_models.checkpoint.families import weight_names
from weir.text_models.checkpoint.reading import read_checkpoint, read_for
from weir.text_models.checkpoint.weights import open_tensors
from weir.text_models.graph.cache import graph_file
from weir.text_models.recipe import chosen_recipe
from weir.text_models.texts import TokenizerOptions, TokenRule


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sizes_and_weights_of_each_family(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.model(tmp_path, family))
    known = checkpoint.architecture
    assert (known.family, known.hidden_size, known.layers, known.heads) == (family, 32, 3, 4)
    assert known.max_length == checkpoint.max_length == 64
    assert known.position_offset == (0 if family in ("bert", "distilbert") else 2)
    assert known.has_pooler is (family != "distilbert")
    assert (checkpoint.poolings, checkpoint.layout.normalize) == ((), False)
    weights = checkpoint.weights()
    assert set(weight_names(family, 3)) <= set(weights)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    labelled = read_checkpoint(tiny.model(tmp_path / "labelled", family, labels=3))
    assert labelled.architecture.labels == 3
    name = "classifier.weight" if family in ("bert", "distilbert") else "classifier.out_proj.weight"
    assert labelled.weights()[name].shape == (3, 32)
    if family == "roberta":
        camembert = tiny.model(tmp_path / "camembert", family, model_type="camembert")
        assert read_checkpoint(camembert).architecture.family == family


@pytest.mark.parametrize("prefix", ["bert.", "model.", "0.auto_model.", "model.bert."])
def test_models_that_were_part_of_another(prefix: str, tmp_path: Path) -> None:
    plain = read_checkpoint(tiny.model(tmp_path / "plain")).weights()
    stored = open_tensors(tmp_path / "plain" / "model.safetensors")
    tiny.model(tmp_path)
    names = {name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in stored}
    old = {names[name]: value for name, value in stored.items()}
    other = {"cls.predictions.bias": np.zeros(181, np.float32), "embeddings.position_ids": np.zeros(64, np.float32)}
    tiny.save(tmp_path / "model.safetensors", {prefix + name: value for name, value in old.items()} | other)
    found = read_checkpoint(tmp_path).weights()
    assert set(found) == set(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(found[name], value)


def test_weights_in_several_files(tmp_path: Path) -> None:
    plain = dict(read_checkpoint(tiny.model(tmp_path)).weights())
    stored = dict(open_tensors(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-{place % 2 + 1:05}-of-00002.safetensors" for place, name in enumerate(stored)}
    for file in set(files.values()):
        tiny.save(tmp_path / file, {name: stored[name] for name in stored if files[name] == file})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    checkpoint = read_checkpoint(tmp_path)
    for name, value in checkpoint.weights().items():
        np.testing.assert_array_equal(plain[name], value)
    before = checkpoint.content_hash()
    last = tmp_path / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-1] + b"\x55")
    assert checkpoint.content_hash() != before


@pytest.mark.parametrize(("kind", "error"), [("F16", 2**-11), ("BF16", 2**-7)])
def test_half_precision_comes_as_float32(kind: str, error: float, tmp_path: Path) -> None:
    whole = read_checkpoint(tiny.model(tmp_path / "whole")).weights()
    half = read_checkpoint(tiny.model(tmp_path / "half", kind=kind)).weights()
    for name, value in whole.items():
        assert half[name].dtype == np.float32
        np.testing.assert_allclose(half[name], value, rtol=error, atol=1e-6)


def test_the_hash_is_that_of_what_decides_the_vectors(tmp_path: Path) -> None:
    first = read_checkpoint(tiny.sentence_model(tmp_path / "a")).content_hash()
    assert read_checkpoint(tiny.sentence_model(tmp_path / "b")).content_hash() == first
    (tmp_path / "b" / "README.md").write_text("changes nothing")
    assert read_checkpoint(tmp_path / "b").content_hash() == first
    others: list[dict[str, Any]] = [{"seed": 1}, {"pooling": "cls"}, {"dense": 8}, {"layer_norm_eps": 0.5}]
    hashes = {
        read_checkpoint(tiny.sentence_model(tmp_path / f"c{place}", **other)).content_hash()
        for place, other in enumerate(others)
    }
    assert len(hashes | {first}) == len(others) + 1


# What sentence-transformers adds to a model: pooling, dense layers, normalisation, lengths, prompts.


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


@pytest.mark.parametrize("name", TODAY)
def test_poolings_of_today_and_switches_of_older_files(name: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, pooling=name, normalize=False))
    assert (checkpoint.poolings, checkpoint.layout.normalize) == ((TODAY[name],), False)
    for switches, expected in (({OLD[other]: other == name for other in OLD}, TODAY[name]), ({}, Pooling.MEAN)):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | switches))
        assert read_checkpoint(tmp_path).poolings == (expected,)


def test_several_poolings_are_joined_as_they_stand(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, pooling=["mean", "cls"]))
    assert checkpoint.poolings == (Pooling.MEAN, Pooling.CLS)


def test_lengths_are_the_smallest_that_is_declared(tmp_path: Path) -> None:
    for said, expected in ((None, 64), (40, 40), (1000, 64)):
        assert read_checkpoint(tiny.sentence_model(tmp_path, "roberta", max_length=said)).max_length == expected
    tiny.change(tmp_path / "sentence_bert_config.json", max_seq_length=None)
    tiny.change(tmp_path / "tokenizer_config.json", model_max_length=20)
    assert read_checkpoint(tmp_path).max_length == 20
    tiny.change(tmp_path / "tokenizer_config.json", model_max_length=10**30)
    assert read_checkpoint(tmp_path).max_length == 64


def test_prompts(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, prompts={"query": "query: ", "passage": "passage: "}))
    assert checkpoint.prompts == {"query": "query: ", "passage": "passage: "}
    assert checkpoint.layout.default_prompt is None
    tiny.change(tmp_path / OTHERS, default_prompt_name="query")
    prompted = read_checkpoint(tmp_path)
    assert prompted.layout.default_prompt == "query"
    given = [prompted.tokenizer(), checkpoint.tokenizer(TokenizerOptions(prompt="query: "))]
    without = [checkpoint.tokenizer(), prompted.tokenizer(TokenizerOptions(prompt=""))]
    for tokenizer in given:
        texts = tokenizer.encode(["do it", ("do", "it"), ["do", "it"]], TokenRule(64))
        assert texts == without[0].encode(["query: do it", ("do", "it"), ["do", "it"]], TokenRule(64))
    assert without[0].encode(["do it"], TokenRule(64)) == without[1].encode(["do it"], TokenRule(64))
    tiny.change(tmp_path / OTHERS, default_prompt_name="question")
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
    assert [len(layer.weight) for layer in document.dense] == [20] and not document.layout.normalize
    assert not query.dense and query.layout.normalize
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
    tiny.change(tmp_path / OTHERS, similarity_fn_name="dot")
    assert read_checkpoint(tmp_path).layout.similarity == "dot"
    tiny.change(tmp_path / OTHERS, similarity_fn_name="angle")
    rule = "similarity_fn_name='angle': must be one of cosine, dot, euclidean, manhattan"
    with pytest.raises(SettingsError, match=rule):
        read_checkpoint(tmp_path)


def test_vectors_are_as_long_as_the_files_say(tmp_path: Path) -> None:
    tiny.sentence_model(tmp_path, pooling="mean")
    tiny.change(tmp_path / OTHERS, truncate_dim=16)
    checkpoint = read_checkpoint(tmp_path)
    for options, expected in (
        (TextSettings(), 16),
        (TextSettings(pooling="REDUCE_MEAN", layers=[-1]), 16),
        (TextSettings(dimensions=20), 20),  # the user's word counts
        (TextSettings(pooling="cls"), None),  # a vector that the files say nothing of
        (TextSettings(layers=[-1, -2]), None),
    ):
        assert chosen_recipe(checkpoint, options).dimensions == expected
    tiny.change(tmp_path / OTHERS, truncate_dim=1000)
    assert chosen_recipe(read_checkpoint(tmp_path)).dimensions == 32
    tiny.change(tmp_path / OTHERS, truncate_dim=0)
    with pytest.raises(SettingsError, match="truncate_dim=0: must be a whole number of at least 1"):
        read_checkpoint(tmp_path)


def test_dense_layers(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.sentence_model(tmp_path, dense=16))
    (layer,) = checkpoint.dense
    assert (layer.weight.shape, layer.bias is not None, layer.activation) == ((16, 32), True, "tanh")
    assert checkpoint.layout.normalize
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
    tiny.change(tmp_path / "sentence_bert_config.json", do_lower_case=True)
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
    tiny.change(tmp_path / file, **values)
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


# Directories that cannot be served are refused by an error that names the file and the rule.


def refused(directory: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_checkpoint(directory).tokenizer()
    return caught.value.message


def test_no_directory_and_no_weights(tmp_path: Path) -> None:
    assert "must be a directory with a model" in refused(tmp_path / "nowhere")
    assert "config.json: cannot be read: No such file" in refused(tmp_path)
    tiny.model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "has no weights: must hold model.safetensors" in refused(tmp_path / "model")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    tiny.model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "Pickles can run any code" in refused(tmp_path)
    assert "save_pretrained(directory, safe_serialization=True)" in refused(tmp_path)


def test_checkpoints_of_tensorflow_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    assert f"convert it with `weir embed convert {tmp_path} TARGET`" in refused(tmp_path)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"model_type": None}, "has no model_type, which the model cannot be read without"),
        ({"model_type": "gpt2"}, "model_type='gpt2': must be one of bert, roberta, camembert"),
        ({"hidden_size": None}, "has no hidden_size or dim"),
        ({"hidden_size": "32"}, "hidden_size='32': must be a whole number of at least 1"),
        ({"hidden_size": 30}, "num_attention_heads=4: must divide the hidden size 30"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: must be a whole number"),
        ({"num_hidden_layers": 4}, "has no weight 'encoder.layer.3.attention.self.query.weight'"),
        ({"layer_norm_eps": 0}, "layer_norm_eps=0: must be a positive number"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key': must be absolute"),
        ({"is_decoder": True}, "is_decoder=True: must be false"),
        ({"max_position_embeddings": 2}, "max_position_embeddings=2: must be more than 2"),
        ({"vocab_size": 1000}, "word_embeddings.weight' has the shape [181, 32], config.json requires [1000, 32]"),
        ({"intermediate_size": 99}, "has the shape [64, 32], config.json requires [99, 32]"),
    ],
)
def test_configurations_that_do_not_fit(values: dict[str, Any], rule: str, tmp_path: Path) -> None:
    tiny.change(tiny.model(tmp_path) / "config.json", **values)
    assert rule in refused(tmp_path)
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "qwen3"])
def test_more_layers_than_the_configuration_names(family: str, tmp_path: Path) -> None:
    tiny.change(tiny.model(tmp_path, family) / "config.json", num_hidden_layers=2, n_layers=2)
    assert "model.safetensors: has weights of 3 layers, config.json names 2" in refused(tmp_path)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers(number: float, kind: str, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model")
    weights = {name: np.array(value) for name, value in open_tensors(directory / "model.safetensors").items()}
    weights["encoder.layer.1.output.dense.weight"][3, 5] = number
    tiny.save(directory / "model.safetensors", weights, kind)
    with pytest.raises(SettingsError) as caught:
        graph_file(read_checkpoint(directory), Recipe(Pooling.MEAN), tmp_path / "cache")
    said = f"{directory}/model.safetensors: 'encoder.layer.1.output.dense.weight' has a weight that is NaN or infinite"
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 5000])
def test_files_that_are_not_json(text: str, tmp_path: Path) -> None:
    (tiny.model(tmp_path) / "config.json").write_text(text)
    assert f"{tmp_path / 'config.json'}: " in refused(tmp_path)


def test_parts_of_different_models(tmp_path: Path) -> None:
    tiny.model(tmp_path, vocab_size=100)
    assert "the tokenizer's vocabulary goes up to the id 180, the weights have 100 words" in refused(tmp_path)
    tiny.change(tiny.model(tmp_path, labels=2) / "config.json", id2label=[])
    assert "id2label=[]: must name at least one label" in refused(tmp_path)
    tiny.save(tmp_path / "model.safetensors", {"wte.weight": np.zeros((2, 2), np.float32)})
    assert "has no weight 'embeddings.word_embeddings.weight'" in refused(tmp_path)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", b"\xff" * 40, header(b"{}"), header(b"[1]"), header(b"not json"), header(b'{"a": 1}'), header(b'{"a": {}}'),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', bytes(8)),
        header(b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', bytes(8)),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', bytes(8)),
        header(b'{"a": {"dtype": "F8", "shape": [8], "data_offsets": [0, 8]}}', bytes(8)),
        header(b'{"a": {"dtype": 3, "shape": "x", "data_offsets": []}}', bytes(8)),
    ],
)  # fmt: skip
def test_safetensors_that_are_broken(content: bytes, tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    assert refused(tmp_path).startswith(f"{path}: ")


def test_quantised_weights(tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"'))
    assert "is quantised: weights must be floating-point numbers" in refused(tmp_path)


def test_safetensors_that_are_cut_or_changed_anywhere(tmp_path: Path) -> None:
    path = tiny.model(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(1)
    refusals = 0
    for _ in range(150):
        data = bytearray(whole[: random.integers(len(whole))]) if random.random() < 0.3 else bytearray(whole)
        for place in random.integers(8 + length, size=2):
            if place < len(data):
                data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            for value in open_tensors(path).values():
                value.sum()
            read_checkpoint(tmp_path)
        except SettingsError as error:
            assert "safetensors" in error.message
            refusals += 1
    assert refusals > 100


@pytest.mark.parametrize("files", [{"a": "../model.safetensors"}, {"a": 3}, [1], None])
def test_indices_of_parts_that_are_wrong(files: Any, tmp_path: Path) -> None:
    tiny.model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "model.safetensors.index.json: " in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "gone.safetensors: cannot be read" in refused(tmp_path)


def test_a_model_with_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "num_layers": 2, "num_heads": 4}
    directory = tiny.change(tiny.model(tmp_path / "model") / "config.json", **sizes)
    with pytest.raises(SettingsError, match="is_encoder_decoder=True: must be false: t5 has a decoder"):
        read_for(directory, ComputingSettings(runtime="torch"))
    with pytest.raises(
        SettingsError,
        match=r"model_type='t5': .* others are served from an ONNX file that the model has, or with --runtime torch",
    ):
        read_for(directory)
