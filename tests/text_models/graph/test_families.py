"""Each family whose layers differ from BERT's gives the vectors that it gave when it was compared (families.npz).

They are those of networks in plain numpy, written from the papers and the code of transformers; reference.py still has the one that transformers lacks.
runtime/test_transformers.py compares each family with transformers itself.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.text_models import tiny
from tests.text_models.graph.reference import Network
from tests.text_models.graph.running import Array, cosines, running

from weir.errors import SettingsError
from weir.text_models import Pooling, Precision, Recipe
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.graph.building import build
from weir.text_models.graph.layers import alibi_slopes
from weir.text_models.texts import TokenRule

FAMILIES = [*tiny.MORE_FAMILIES]
EXACT = 0.99999
VECTORS = np.load(Path(__file__).parent / "families.npz")  # of the tokens of all texts, by family
random = np.random.default_rng(11)
TEXTS = [random.integers(5, 150, count) for count in (7, 40, 1, 23)]
SECONDS = [3, 0, 0, 11]  # where the second text of a pair begins

Made = tuple[Checkpoint, list[Array]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return the checkpoint of a family, which is written once, and the vectors of the tokens of each text."""
    folder, read = tmp_path_factory.mktemp("models"), dict[str, Checkpoint]()

    def get(family: str) -> Made:
        if family not in read:
            read[family] = read_checkpoint(tiny.model(folder / family, family, tokenizer=False))
        return read[family], np.split(VECTORS[family], np.cumsum([len(text) for text in TEXTS])[:-1])

    return get


@pytest.mark.parametrize("family", ["jina-bert", "jina-code", "nomic-moe"])
def test_what_transformers_lacks_is_what_papers_describe(family: str, made: Callable[[str], Made]) -> None:
    checkpoint, expected = made(family)
    network = Network(checkpoint.directory)
    compute = network.nomic if family == "nomic-moe" else network.jina
    for text, second, tokens in zip(TEXTS, SECONDS, expected, strict=True):
        types = ((np.arange(len(text)) >= second) & (second > 0)).astype(int)
        assert np.abs(compute(text, types) - tokens).max() < 1e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference_whatever_the_batch(
    family: str, device: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    # A CPU runs the graphs for GPUs too.
    checkpoint, expected = made(family)
    run = running(build(checkpoint, Recipe(Pooling.NONE), device), tmp_path / "graph")
    together = run(TEXTS, SECONDS)
    for place, (text, tokens) in enumerate(zip(TEXTS, expected, strict=True)):
        alone = run([text], [SECONDS[place]], width=checkpoint.architecture.max_length)[0]
        for found in (together[place], alone):
            assert cosines(found[: len(text)], tokens).min() >= EXACT
            assert np.abs(found[: len(text)] - tokens).max() < 1e-4


@pytest.mark.parametrize(("precision", "least"), [(Precision.FP16, 0.999), (Precision.INT8, 0.97)])
@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_bits_come_close(
    family: str, precision: Precision, least: float, made: Callable[[str], Made], tmp_path: Path
) -> None:
    checkpoint, expected = made(family)
    found = running(build(checkpoint, Recipe(Pooling.MEAN, precision=precision)), tmp_path / "graph")(TEXTS, SECONDS)
    assert cosines(found, np.stack([tokens.mean(axis=0) for tokens in expected])).mean() >= least


@pytest.mark.parametrize(
    "family", ["electra", "albert", "deberta-v3", "nomic-bert", "gte", "jina-bert", "qwen2-both-ways"]
)
def test_without_positions_the_order_does_not_count(family: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    checkpoint, _ = made(family)
    run = running(build(checkpoint, Recipe(Pooling.MEAN, positions=False)), tmp_path / "graph")
    assert np.allclose(run([TEXTS[3]]), run([TEXTS[3][::-1]]), atol=1e-5)


def test_earlier_layers_are_not_normalized_as_the_last(made: Callable[[str], Made], tmp_path: Path) -> None:
    """As in transformers, the vectors of a layer before the last are those between layers."""
    checkpoint, expected = made("qwen3")
    both = running(build(checkpoint, Recipe(Pooling.NONE, layers=(-2, -1))), tmp_path / "both")([TEXTS[0]])[0]
    before = running(build(checkpoint, Recipe(Pooling.NONE, layers=(-2,))), tmp_path / "one")([TEXTS[0]])[0]
    assert np.allclose(both[:, :32], before, atol=1e-6)
    assert np.allclose(both[:, 32:], expected[0], atol=1e-4)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_an_expert_that_no_token_chose_is_not_computed(precision: Precision, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model", "nomic-moe", tokenizer=False)
    weights = dict(load_file(directory / "model.safetensors"))
    weights["encoder.layers.1.mlp.router.layer.weight"][:] = 0  # all are as likely: the first two are chosen
    weights["encoder.layers.1.mlp.experts.mlp.w1"][2 * 64 :] = 1e38  # what overflows
    tiny.save(directory / "model.safetensors", weights)
    recipe = Recipe(Pooling.NONE, precision=precision)
    assert np.isfinite(running(build(read_checkpoint(directory), recipe), tmp_path / "graph")(TEXTS)).all()


def test_nemotron_scores_by_the_mean_of_the_tokens_of_its_own_text(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path / "model", "llama-both-ways", labels=2)
    checkpoint = read_checkpoint(directory)
    pair, whole = ("what is {it}", "a weir"), "question:what is {it} \n \n passage:a weir"
    read, expected = checkpoint.tokenizer().encode([pair, whole], TokenRule(99))
    assert read == expected
    means, logits = (
        running(build(checkpoint, Recipe(pooling)), tmp_path / pooling.value)(TEXTS)
        for pooling in (Pooling.MEAN, Pooling.LOGITS)
    )
    assert np.allclose(logits, means @ checkpoint.weights()["score.weight"].T, atol=1e-5)
    for values, rule in (({"pooling": "max"}, "must be one of avg, cls, last"), ({"temperature": 0.5}, "must be 1")):
        tiny.change(directory / "config.json", **values)
        with pytest.raises(SettingsError, match=rule):
            read_checkpoint(directory)
        tiny.change(directory / "config.json", pooling="avg")


def test_positions_beyond_a_million_are_not_served(tmp_path: Path) -> None:
    directory = tiny.model(tmp_path, "llama", tokenizer=False, max_position_embeddings=10**9)
    assert read_checkpoint(directory).max_length == 1 << 20


def test_slopes_of_numbers_of_heads_that_are_no_powers_of_two() -> None:
    assert np.allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert np.allclose(alibi_slopes(12), [*2.0 ** -np.arange(1, 9), *2.0 ** -np.array([0.5, 1.5, 2.5, 3.5])])


@pytest.mark.parametrize(
    ("family", "values", "rule"),
    [
        ("albert", {"num_hidden_groups": 2}, "num_hidden_groups=2: must be 1"),
        ("deberta-v2", {"relative_attention": False}, "relative_attention=False: must be true"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size=3: must be 0"),
        ("modernbert", {"layer_types": ["full_attention"]}, "must name full_attention or sliding_attention for each of 3 layers"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "must be null"),
        ("nomic-bert", {"prenorm": True}, "prenorm=True: must be false"),
        ("nomic-bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5: must be 1"),
        ("gte", {"layer_norm_type": "rms_norm"}, "must be layer_norm"),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale=True: must be false"),
        ("jina-bert", {"feed_forward_type": "original"}, "must be geglu or reglu"),
        ("nomic-moe", {"num_shared_experts": 1}, "num_shared_experts=1: must be false or 0"),
        ("nomic-moe", {"moe_top_k": 6}, "moe_top_k=6: must be at most num_experts=5"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 1,000"),
        ("llama", {"rope_parameters": {"full_attention": 3}}, "must state full_attention as an object"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "has no factor, which the model cannot be read without"),
        ("llama", {"rope_scaling": tiny.LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor=4.0: must be less than high_freq_factor=4.0"),
        ("qwen2", {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide the 4 heads"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling={'rope_type': 'yarn', 'factor': 4.0}: must be null"),
    ],
)  # fmt: skip
def test_variants_that_are_not_computed(family: str, values: dict[str, object], rule: str, tmp_path: Path) -> None:
    directory = tiny.model(tmp_path, family, tokenizer=False)
    with pytest.raises(SettingsError) as caught:
        read_checkpoint(tiny.change(directory / "config.json", **values))
    assert rule in caught.value.message
