from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from tests.rings import subcases

import weir
from weir.errors import SettingsError
from weir.model import PAD, RAGGED, Model, Tensor, _device, adapted, check_model, function_of, is_batched
from weir.serving import compose

X, Y = Tensor("x", "FP32", [-1, -1]), Tensor("y", "FP32", [-1, -1])


def declared(inputs: Sequence[Tensor] = (X,), outputs: Sequence[Tensor] = (Y,), **more: Any) -> type[Model]:
    body = {"inputs": inputs, "outputs": outputs, "predict": lambda self, batch: batch, **more}
    return type("Mine", (Model,), body)


def test_what_can_be_declared() -> None:
    padded = X._replace(varying=PAD)
    ragged = Tensor("r", "BYTES", [-1, -1, 3], varying=RAGGED, pad_value=b"-", lengths="n")
    outputs = (Y._replace(like="x"), Tensor("z", "INT8", [-1, -1], like="r"), Tensor("w", "INT8", [-1, 2]))
    check_model(declared((padded, ragged), outputs, allowed_batch_sizes=[1, 8]))
    assert padded.lengths_name == "x_lengths"
    assert ragged.lengths_name == "n"
    assert Tensor("a", "INT8", [-1, 2, -1, -1]).variable == (2, 3)


@subcases(
    ("inputs", "outputs", "words"),
    [
        ([X, X], [Y], "tensor 'x' is declared twice"),
        ([X], [Y, Y], "tensor 'y' is declared twice"),
        ([X._replace(datatype="FP8")], [Y], "tensor 'x' has datatype 'FP8', not one of BOOL"),
        ([X._replace(shape=[])], [Y], "tensor 'x' has shape []"),
        ([X._replace(shape=[-1, 0])], [Y], "tensor 'x' has shape [-1, 0]"),
        ([X._replace(varying="padded")], [Y], "varying='padded', must be 'group', 'pad' or 'ragged'"),
        ([X._replace(varying=PAD, shape=[-1, 2])], [Y], "to be padded it must have a -1"),
        ([X._replace(varying=RAGGED, shape=[-1, 2, -1])], [Y], "only the second length of a ragged one is -1"),
        ([X._replace(varying=PAD, pad_value="-")], [Y], "pad_value='-', which is not a FP32"),
        ([X._replace(varying=PAD, pad_value=1, datatype="BYTES")], [Y], "pad_value=1, which is not a BYTES"),
        (
            [X._replace(varying=PAD, lengths="y"), Tensor("y", "INT8", [-1])],
            [Y],
            "lengths='y', which is an input already",
        ),
        ([X._replace(like="x")], [Y], "like='x', which is for outputs"),
        ([X], [Y._replace(varying=PAD)], "varying='pad', which is for inputs"),
        ([X], [Y._replace(like="x")], "like='x', which is not a padded or ragged input"),
        ([X._replace(varying=PAD)], [Y._replace(like="x", shape=[-1, 2])], "they must have -1 alike"),
        ([X._replace(varying=RAGGED)], [Y._replace(like="x", shape=[-1, 2, -1])], "they must have -1 alike"),
    ],
)
def test_what_cannot_be_declared(inputs: list[Tensor], outputs: list[Tensor], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_model(declared(inputs, outputs))
    assert caught.value.message.startswith("Mine: tensor ")
    assert words in caught.value.message


@subcases(
    ("inputs", "more", "words"),
    [
        ([X._replace(varying=PAD)], {}, "'x' varies"),
        ([X], {"allowed_batch_sizes": [1]}, "allowed_batch_sizes is set"),
        ([X], {"input_buffers": lambda self, rows: {}}, "it has input_buffers"),
    ],
)
def test_a_streaming_model_gets_requests_as_they_are(inputs: list[Tensor], more: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"Mine: {words}, but a streaming model gets the requests one by one"):
        check_model(declared(inputs, streaming=True, **more))


@subcases("sizes", [[], [0], [1.5], ["1"]])
def test_batch_sizes_that_cannot_be(sizes: list[Any]) -> None:
    with pytest.raises(SettingsError, match=r"Mine: allowed_batch_sizes=.*, must be whole numbers of at least 1"):
        check_model(declared(allowed_batch_sizes=sizes))


def test_a_batch_must_fit_into_an_allowed_size() -> None:
    model = declared(allowed_batch_sizes=[4, 16])
    assert compose(model, {"max_batch_size": 10}).batching.max_batch_size == 10
    with pytest.raises(
        SettingsError, match="max_batch_size=17: must be at most 16, the largest of the model's allowed_batch_sizes"
    ):
        compose(model, {"max_batch_size": 17})


def test_a_slip_of_the_pen_is_refused() -> None:
    slips: list[tuple[dict[str, Any], str]] = [
        ({"max_batchsize": 8}, "max_batch_size"), ({"example": [1]}, "examples"), ({"preproces": len}, "preprocess"),
        ({"worker": 2}, "workers"), ({"MaxBatchSize": 8}, "max_batch_size"), ({"content_type": ["a/b"]}, "content_types"),
    ]  # fmt: skip
    for attributes, meant in slips:
        (name,) = attributes
        with pytest.raises(SettingsError, match=f"Slip.{name}: unknown attribute; did you mean {meant}\\?"):
            check_model(type("Slip", (Model,), {"predict": lambda self, batch: batch, **attributes}))


def test_words_of_their_own_are_no_slips() -> None:
    words = ("decoder", "encoder", "preprocessor", "predictor", "loaded", "tokenizer", "weights", "scale", "_example")
    own = dict.fromkeys(words, 1)
    model = type("Own", (Model,), {"predict": lambda self, batch: batch, **own})
    assert check_model(model) is model


def test_hooks_that_are_awaited_are_refused() -> None:
    async def predict(self: Model, batch: Any) -> Any:
        return batch

    async def stream(self: Model, batch: Any) -> Any:
        yield {}

    async def fetch(batch: Any) -> Any:
        return batch

    for attributes in ({"predict": predict}, {"predict": stream}, {"predict": len, "load": predict}):
        with pytest.raises(SettingsError, match="is an async function, but workers have no event loop"):
            check_model(type("Awaited", (Model,), attributes))
    with pytest.raises(SettingsError, match=r"fetch.predict: is an async function"):
        check_model(fetch)


def test_a_function_is_a_model() -> None:
    def square(batch: list[int]) -> list[int]:
        """Square them."""
        return [x * x for x in batch]

    model = check_model(square)
    assert (model.__name__, model.__doc__, model().predict([2, 3])) == ("square", "Square them.", [4, 9])
    assert function_of(model) is square
    assert function_of(Model) is None
    sized = Model.from_function(square, max_batch_size=8, examples=[2])
    assert (sized.max_batch_size, sized.examples) == (8, [2])
    assert check_model(lambda batch: batch).__name__ == "Function"
    assert list(check_model(numpy.square)().predict([3])) == [9]
    no_functions: list[Any] = [int, 3, None]
    for wrong in no_functions:
        with pytest.raises(SettingsError, match="must be a function: a list of items in, a list of results out"):
            Model.from_function(wrong)


def test_model_makes_a_class_of_a_function_and_is_a_decorator() -> None:
    @weir.model
    def halves(batch: list[float]) -> list[float]:
        return [x / 2 for x in batch]

    @weir.model(max_batch_size=8, Input=int)
    def twice(batch: list[int]) -> list[int]:
        return [2 * x for x in batch]

    assert (halves.__name__, halves().predict([3])) == ("halves", [1.5])
    assert (twice.max_batch_size, twice.Input, twice().predict([3])) == (8, int, [6])
    assert list(weir.model(numpy.square, examples=[2])().predict([3])) == [9]
    no_function: Any = Model
    with pytest.raises(SettingsError, match="must be a function"):
        weir.model(max_batch_size=8)(no_function)


def test_a_class_of_nobody_that_is_known_is_no_model() -> None:
    assert adapted(dict) is None
    with pytest.raises(SettingsError, match=r"<class 'dict'>: must be a subclass of weir.Model, or a function"):
        check_model(dict)


LIST, WHOLE = Tensor("l", "FP32", (-1,)), Tensor("w", "FP32", (), batch="none")


def test_a_model_without_a_batch_declares_whole_shapes() -> None:
    alone = declared([Tensor("x", "FP32", (3, 8), batch="none"), WHOLE], [WHOLE])
    assert check_model(alone) is alone
    assert (is_batched(alone), is_batched(declared())) == (False, True)
    assert compose(alone, {"max_batch_size": 8}).batching.max_batch_size == 1  # it may hold for all models of a server


@subcases(
    ("model", "message"),
    [
        (declared([LIST._replace(batch="no")]), "has batch='no', must be 'required', 'optional' or 'none'"),
        (declared([LIST, WHOLE], [LIST]), "tensor 'w' has batch='none', 'l' 'required'; they must be equal"),
        (declared([LIST], [WHOLE]), "tensor 'w' has batch='none', 'l' 'required'; they must be equal"),
        (declared([WHOLE._replace(batch="required")]), "it must start with the batch dimension (without one, set batch='none')"),
        (declared([WHOLE._replace(shape=(-1, -1), varying=PAD)], [WHOLE]), "but a model without batches gets the requests one by one"),
        (declared([WHOLE], [WHOLE], allowed_batch_sizes=(2,)), "allowed_batch_sizes is set, but a model without batches"),
        (declared([X._replace(format="NCHW")]), "has format='NCHW', must be one of FORMAT_NHWC, FORMAT_NCHW, or nothing"),
        (declared([X._replace(varying=PAD, optional=True)]), "is optional and has varying='pad'; only one may be"),
        (declared(outputs=[Y._replace(optional=True)]), "is optional or has a format, which is for inputs"),
    ],
)  # fmt: skip
def test_what_a_batch_dimension_cannot_be(model: type[Model], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        check_model(model)
    assert message in refused.value.message


@subcases(
    ("wanted", "worker", "gpus", "mps", "device"),
    [
        ("auto", 0, 0, False, "cpu"), ("auto", 3, 0, True, "mps"), ("auto", 0, 2, False, "cuda:0"),
        ("auto", 3, 2, True, "cuda:1"), ("cuda", 2, 2, False, "cuda:0"), ("cuda:1", 0, 2, False, "cuda:1"),
        ("cpu", 1, 2, False, "cpu"), ("xpu", 0, 0, False, "xpu"),
    ],
)  # fmt: skip
def test_workers_get_the_gpus_in_turn(wanted: str, worker: int, gpus: int, mps: bool, device: str) -> None:
    assert _device(wanted, worker, gpus, lambda: mps) == device


@subcases(("wanted", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("cuda:x", 1)])
def test_a_gpu_that_is_not_there_is_refused(wanted: str, gpus: int) -> None:
    with pytest.raises(SettingsError, match=rf"device='{wanted}': torch sees {gpus} GPUs here"):
        _device(wanted, 0, gpus, lambda: False)
