"""The model that workers run, on a tiny network: whatever the item, the batch and the run, a text has its vector."""

import asyncio
import json
import struct
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from tests.rings import spread
from tests.text_models import tiny
from tests.text_models.opening import params_of

from weir import Service
from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, Batch
from weir.text_models.model import TextEncoder, TokenIds, estimated_tokens, padded_inputs, runs
from weir.text_models.runtime import Inputs, Widths, open_runtime
from weir.text_models.texts import Tokens
from weir.workers.run.runner import RunnableModel, Runner

TEXTS = ["the weather is lovely", "so sunny", "he drove to the stadium because his team was playing", "a", "so it is"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.sentence_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def loaded(directory: Path, cache: Path, **settings: Any) -> Runner:
    given = params_of(directory, cache, **settings)
    runner = Runner(RunnableModel(TextEncoder, given, 4, label="texts"), 0, fatal=())
    runner.start()
    return runner


def encode(runner: Runner, *items: Any, content_type: str = OBJECT, accept: str = OBJECT) -> list[Any]:
    return runner.compute(runner.prepare(Batch(0, list(items), content_type, accept))).outputs


def ids_of(runner: Runner, text: str) -> list[int]:
    (read,) = runner.prepare(Batch(0, [text], OBJECT, OBJECT)).column
    ids: list[int] = read.ids.tolist()
    return ids


def vector_of(directory: Path, cache: Path, item: Any = "so sunny", **params: Any) -> Any:
    """Return the vector of an item by a model with these parameters."""
    return encode(loaded(directory, cache, **params), item)[0]


def same(one: Any, other: Any) -> bool:
    return np.asarray(one).shape == np.asarray(other).shape and np.allclose(one, other, atol=1e-5)


def test_a_vector_does_not_depend_on_the_batch_the_order_or_the_run(directory: Path, cache: Path) -> None:
    runner = loaded(directory, cache)
    alone = [encode(runner, text)[0] for text in TEXTS]
    assert all(vector.shape == (tiny.HIDDEN,) and vector.dtype == np.float32 for vector in alone)
    assert all(abs(float(vector @ vector) - 1) < 1e-5 for vector in alone)
    assert not same(alone[0], alone[1])
    for run_tokens in (1, 12, 1000):
        together = encode(loaded(directory, cache, run_tokens=run_tokens), *reversed(TEXTS))
        assert all(same(*pair) for pair in zip(reversed(alone), together, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_gpu_that_is_not_there_is_refused(directory: Path, cache: Path, threads: int) -> None:
    with pytest.raises(SettingsError, match="device '7': the runtime finds no GPU here"):
        loaded(directory, cache, device_map=["7"], threads=threads)


def test_every_form_of_a_text_has_the_vector_of_its_tokens(directory: Path, cache: Path) -> None:
    runner = loaded(directory, cache)
    read, pair = runner.prepare(Batch(0, ["so sunny", ("so sunny", "it is")], OBJECT, OBJECT)).column
    vector, of_pair = encode(runner, Tokens(read.ids.tobytes()), Tokens(pair.ids.tobytes(), pair.second))
    assert not same(vector, of_pair)
    plain = Tokens(pair.ids.tobytes(), pair.second).as_plain()
    for item in ("so sunny", ["so", "sunny"], read.ids.tolist(), {"text": "so sunny"}, Tokens(read.ids.tobytes())):
        assert same(encode(runner, item)[0], vector), item
    for item in (("so sunny", "it is"), {"text": "so sunny", "pair": "it is"}, plain):
        assert same(encode(runner, item)[0], of_pair), item
    assert same(encode(runner, read.ids.tobytes(), content_type=OCTETS)[0], vector)


@pytest.mark.parametrize(("content_type", "read"), [(JSON, json.loads), (MSGPACK, msgspec.msgpack.decode)])
def test_endpoints_get_lists_of_numbers(directory: Path, cache: Path, content_type: str, read: Any) -> None:
    runner = loaded(directory, cache)
    (vector,) = encode(runner, "so sunny")
    body = json.dumps("so sunny").encode() if content_type == JSON else msgspec.msgpack.encode("so sunny")
    (answer,) = encode(runner, body, content_type=content_type, accept=content_type)
    assert same(read(answer), vector)


@pytest.mark.parametrize(
    ("item", "rule"),
    [
        (5, "an item of type int: must be a text"),
        (None, "must be a text"),
        ("", "empty"),
        ([], ""),
        ("\ud800", "not valid Unicode"),
        ({"text": 3}, "all strings"),
        ({"pair": "b"}, "must be a text"),
        ({"text": "a", "more": "b"}, "must be a text"),
        ([1, -1], "-1"),
        ([1, 10**6], "1000000"),
        ([[1]], ""),
        (b"", "0 bytes: must be one or more"),
        (b"abc", "3 bytes"),
        (struct.pack("<i", 10**6), "must be 0 to"),
        (struct.pack("<i", -2), "must be 0 to"),
        (struct.pack("<i", 1) * 65, "65 token ids: must be at most 64"),
        ((b"abcd", 1), "must be 0 to"),
    ],
)
def test_an_item_that_is_no_text_fails_alone_and_says_why(directory: Path, cache: Path, item: Any, rule: str) -> None:
    first, wrong, last = encode(loaded(directory, cache), "so sunny", item, "so sunny")
    assert isinstance(wrong, InvalidRequest)
    assert rule in str(wrong)
    assert same(first, last)


def test_a_text_that_is_too_long_is_cut_or_refused(directory: Path, cache: Path) -> None:
    long = "so sunny " * 100
    runner = loaded(directory, cache)
    ids = ids_of(runner, long)
    assert len(ids) == 64
    assert same(vector_of(directory, cache, long, max_length=10), encode(runner, [*ids[:9], ids[-1]])[0])
    assert isinstance(vector_of(directory, cache, long, truncate=False), InvalidRequest)


@pytest.mark.parametrize("mask_special", [False, True])
def test_each_token_may_have_a_vector(directory: Path, cache: Path, mask_special: bool) -> None:
    runner = loaded(directory, cache, pooling="none", run_tokens=1000, mask_special=mask_special)
    long, short = encode(runner, "the weather is lovely", "so sunny")
    count = len(ids_of(runner, "so sunny"))
    assert long.shape == (len(ids_of(runner, "the weather is lovely")), tiny.HIDDEN)
    assert short.shape == (count, tiny.HIDDEN)
    fixed = vector_of(directory, cache, pooling="none", fixed_length=True, max_length=20, mask_special=mask_special)
    assert fixed.shape == (20, tiny.HIDDEN)
    assert same(fixed[:count], short)
    assert not fixed[count:].any()
    assert bool(short[0].any()) is not mask_special


@pytest.mark.parametrize("pooling", spread(["mean", "max", "hierarchical", "mean-max"], 2))
def test_hidden_special_tokens_are_as_if_there_were_none(directory: Path, cache: Path, pooling: str) -> None:
    said: dict[str, Any] = {"pooling": pooling, "positions": False}  # they would have places otherwise
    hidden, masked, without = (
        encode(loaded(directory, cache, **said, **more), *TEXTS)
        for more in ({"mask_special": True, "hide_special": True}, {"mask_special": True}, {"special_tokens": False})
    )
    assert same(hidden, without)
    assert not same(hidden, masked)


def test_special_tokens_are_hidden_from_poolings_that_do_not_read_them(directory: Path, cache: Path) -> None:
    def shown_and_hidden(pooling: str, **params: Any) -> list[Any]:
        return [vector_of(directory, cache, pooling=pooling, hide_special=hide, **params) for hide in (False, True)]

    for pooling in ("cls", "sep"):
        assert same(*shown_and_hidden(pooling))
    masked, hidden = shown_and_hidden("none", mask_special=True)
    assert not hidden[[0, -1]].any() and hidden[1:-1].any(axis=1).all()
    assert hidden.shape == masked.shape and not same(hidden, masked)


def test_a_fixed_length_changes_no_vector(directory: Path, cache: Path) -> None:
    assert same(vector_of(directory, cache, fixed_length=True), vector_of(directory, cache, fixed_length=False))


def test_the_defaults_are_what_the_files_declare(tmp_path: Path, cache: Path) -> None:
    own = tiny.sentence_model(tmp_path / "cls", "distilbert", pooling="cls", normalize=False)
    plain = tiny.model(tmp_path / "plain", "bert")
    stated = {"pooling": "CLS_TOKEN", "normalize": False, "layers": [-1]}
    last = {"pooling": "mean", "layers": [-1], "normalize": False}
    for model, given, same_as in (
        (own, {}, stated), (plain, {}, last), (plain, {"bare_layer": -2}, {"pooling": "mean", "layers": [-2]}), (own, {"bare_layer": -2}, {}),
    ):  # fmt: skip
        assert same(vector_of(model, cache, **given), vector_of(model, cache, **same_as))
    assert vector_of(plain, cache, pooling="mean-max", layers=[-1, -2], dimensions=50).shape == (50,)


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"pooling": "most"}, "pooling='most'"),
        ({"precision": "fp4"}, "precision='fp4': must be one of"),
        ({"runtime": "tensorflow"}, "runtime='tensorflow': must be one of onnx, torch"),
        ({"device_map": ["gpu"]}, r"device_map=\['gpu'\]: each must be auto, cpu"),
        ({"layers": [-9]}, "-9"),
    ],
)
def test_what_cannot_be_is_reported_when_the_model_is_loaded(
    directory: Path, cache: Path, params: dict[str, Any], rule: str
) -> None:
    with pytest.raises(SettingsError, match=rule):
        loaded(directory, cache, **params)


def test_settings_may_be_tables_as_a_command_line_has_them(directory: Path, cache: Path) -> None:
    model = TextEncoder(str(directory), {"pooling": "cls"}, {"cache": str(cache)}, {"run_tokens": 7})
    assert (model.text.pooling, model.computing.cache, model.run_tokens) == ("cls", str(cache), 7)
    with pytest.raises(SettingsError, match="precision='fp4': must be one of"):
        TextEncoder(str(directory), computing={"precision": "fp4"})


def test_size_is_known_of_tokens_and_estimated_of_texts() -> None:
    assert TextEncoder.measure(Tokens(bytes(48))).cost == 12
    assert estimated_tokens(bytes(48)) == 12
    assert estimated_tokens("a text of english words, forty characters") == 3 + 41 // 4
    assert estimated_tokens([1, 2, 3]) == 3
    assert estimated_tokens({"text": "abcd", "pair": "abcd"}) == estimated_tokens(("abcd", "abcd")) == 8
    assert estimated_tokens(None) == estimated_tokens(b"") == estimated_tokens({}) == 1


def read(*ids: int, second: int = 0) -> TokenIds:
    return TokenIds(np.array(ids, np.int32), second)


def test_no_run_has_more_tokens_than_it_may_but_for_a_text_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300).tolist()
    cut = list(runs(lengths, 128))
    assert sorted(place for run in cut for place in run) == list(range(300))
    assert all(len(run) == 1 or len(run) * max(lengths[place] for place in run) <= 128 for run in cut)
    waste = sum(len(run) * max(lengths[place] for place in run) for run in cut) / sum(lengths) - 1
    assert waste < 0.02


def test_texts_of_like_length_run_together_and_padding_may_count_less() -> None:
    assert list(runs([], 128)) == []
    assert list(runs([9, 2, 8, 1, 2], 20)) == [[3, 1, 4], [2, 0]]
    assert list(runs([2, 10, 4], 12)) == [[0, 2], [1]]
    assert list(runs([2, 10, 4], 20, 0.25)) == [[0, 2, 1]]  # 16 tokens, and 14 of padding: 19.5
    assert list(runs([2, 10, 4], 19, 0.25)) == [[0, 2], [1]]


def test_shorter_texts_are_filled_up() -> None:
    inputs = padded_inputs([read(2, 7, 3), read(2, 5, 3, 6, 3, second=3)], pad_id=1, mask_special=False)
    assert inputs.ids.tolist() == [[2, 7, 3, 1, 1], [2, 5, 3, 6, 3]]
    assert inputs.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert inputs.types.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert inputs.pool.tolist() == inputs.mask.tolist()
    assert [array.dtype.name for array in inputs] == ["int32", "int32", "int32", "float32"]


def test_special_tokens_do_not_count_unless_there_are_no_others() -> None:
    inputs = padded_inputs([read(2, 7, 8, 3), read(2, 3)], pad_id=0, mask_special=True)
    assert inputs.pool.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    texts = [read(2, 7, 8, 3), read(2, 3), read(2, 5, 3, 6, 3, second=3)]
    inputs = padded_inputs(texts, pad_id=0, mask_special=True, hide_special=True)
    assert inputs.mask.tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]]
    assert inputs.pool.tolist() == inputs.mask.tolist()
    shown = padded_inputs(texts, pad_id=0, mask_special=False, hide_special=True)
    assert shown.pool.tolist() == inputs.pool.tolist() and shown.ids.tolist() == inputs.ids.tolist()
    assert padded_inputs([read(2, 3)], pad_id=0, mask_special=False, length=4).ids.shape == (1, 4)


def threads_of(pid: int) -> dict[str, int]:
    """Return for how many nanoseconds each further thread of a process has run."""
    others = [each for each in Path(f"/proc/{pid}/task").iterdir() if each.name != str(pid)]
    return {each.name: int((each / "schedstat").read_text().split()[0]) for each in others}


class Widest(TextEncoder):
    """Computes what runs alone with all threads, fast or not."""

    def load(self) -> None:
        super().load()
        threads = self.share.lone_threads
        self._widths = {images: Widths({threads: each._runtimes[threads]}) for images, each in self._widths.items()}


def test_a_batch_alone_is_computed_by_the_threads_of_idle_workers_too(tmp_path: Path) -> None:
    directory = tiny.sentence_model(tmp_path / "bert", "bert")
    texts = [" ".join(TEXTS)] * 16  # so many that the network gives a further thread some

    async def vectors(lone_threads: int) -> Any:
        params = params_of(directory, tmp_path, lone_threads=lone_threads)
        async with Service(Widest, params=params, workers=2, max_batch_size=16, name="texts") as service:
            pids = [state.pid for state in service.executor.states() if state.pid is not None]
            before = [threads_of(pid) for pid in pids]
            assert [len(each) for each in before] == [lone_threads - 1] * 2
            found = await service.infer_many(texts)
            # A thread that wakes up too late finds nothing left to do, but sooner or later one is in time.
            for _ in range(1000 if lone_threads > 1 else 0):
                assert np.array_equal(await service.infer_many(texts), found)
                if [threads_of(pid) for pid in pids] != before:
                    return found
            assert lone_threads == 1, "no further thread of a worker has run"
            return found

    assert np.array_equal(asyncio.run(vectors(1)), asyncio.run(vectors(2)))


def test_a_batch_beside_others_keeps_to_its_own_threads(directory: Path, cache: Path) -> None:
    runner = loaded(directory, cache, lone_threads=2)
    model: Any = runner._model
    used: list[int] = []
    own, wide = (Noting(model._widths[False]._runtimes[threads], threads, used) for threads in (1, 2))
    model._runtimes, model._widths = {False: own}, {False: Widths({2: cast(Any, wide)})}
    for share in (1, 2, 3, 1):
        list(runner.run(runner.prepare(Batch(0, [TEXTS[0]], OBJECT, OBJECT, share=share))))
    assert used == [1, 2, 2, 1]


class Noting:
    """A runtime that notes its number of threads when it runs."""

    def __init__(self, runtime: Any, threads: int, used: list[int]) -> None:
        self._runtime, self._threads, self._used = runtime, threads, used

    def run(self, *given: Any) -> Any:
        self._used.append(self._threads)
        return self._runtime.run(*given)


class OddRuntime:
    """A runtime that computes `number` for texts with the token id `odd`, and for padding."""

    def __init__(self, runtime: Any, odd: int, number: float) -> None:
        self.device, self._runtime, self._odd, self._number = runtime.device, runtime, odd, number

    def run(self, inputs: Inputs, poolings: Any) -> Any:
        return [self._changed(result, inputs) for result in self._runtime.run(inputs, poolings)]

    def _changed(self, result: Any, inputs: Inputs) -> Any:
        result = np.array(result)
        result[(inputs.ids == self._odd).any(axis=1), ..., -1] = self._number
        if result.ndim == 3:
            result[inputs.mask == 0] = self._number
        return result


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pooling", ["mean", "none"])
@pytest.mark.parametrize("accept", [OBJECT, JSON])
def test_numbers_that_are_none_are_the_error_of_their_text_alone(
    directory: Path, cache: Path, number: float, pooling: str, accept: str
) -> None:
    runner = loaded(directory, cache, pooling=pooling)
    expected = encode(runner, *TEXTS, accept=accept)
    model: Any = runner._model
    others = {token for place in (0, 2, 3, 4) for token in ids_of(runner, TEXTS[place])}
    model._runtimes[False] = OddRuntime(model._runtimes[False], min({*ids_of(runner, TEXTS[1])} - others), number)
    found = encode(runner, *TEXTS, accept=accept)
    assert isinstance(found[1], ModelError) and "NaN or infinite numbers for this text" in found[1].message
    for place in (0, 2, 3, 4):
        assert found[place] == expected[place] if accept == JSON else same(found[place], expected[place])


def test_a_model_whose_examples_have_such_numbers_does_not_start(
    directory: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_every_text = 2  # the id of the first token, as tiny.py makes its vocabulary
    monkeypatch.setattr(
        "weir.text_models.model.open_runtime", lambda *given: OddRuntime(open_runtime(*given), of_every_text, np.nan)
    )
    with pytest.raises(ModelError, match=r"warm-up of .*, example 0 .*NaN or infinite"):
        loaded(directory, cache)
