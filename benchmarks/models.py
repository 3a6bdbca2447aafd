"""The models that are measured."""

import math
import time
from typing import Any, ClassVar

import numpy

import weir
from weir.policy.cost import GOOGLENET_P4

# The paper's example ten times slower, so that sleeping is accurate: 3.051·b + 10.52 ms.
TEN_TIMES = GOOGLENET_P4.scaled(time=10.0, energy=10.0)
SLEEP_ERROR = 0.0005  # seconds that a sleep may last too long
SLEPT_LONGER = 0.0001  # seconds that a sleep takes more, about


class Square(weir.Model):
    """The smallest model: what is measured is the server."""

    examples = (3,)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Seed(weir.Model):
    """The model of "Service batching from scratch": a batch costs little more than one item."""

    max_batch_size = 200

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.001 * math.log(len(batch) + 1))
        return [x * x for x in batch]


class Length(weir.Model):
    """Takes a large body and says how long it is."""

    examples: ClassVar[list[bytes]] = [b"12345"]

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(body) for body in batch]


class Simple(weir.Model):
    """Sum and difference of two rows of 16 numbers: a small tensor model."""

    inputs = (weir.Tensor("INPUT0", "INT32", [-1, 16]), weir.Tensor("INPUT1", "INT32", [-1, 16]))
    outputs = (weir.Tensor("OUTPUT0", "INT32", [-1, 16]), weir.Tensor("OUTPUT1", "INT32", [-1, 16]))
    examples = ({"INPUT0": [[1] * 16], "INPUT1": [[1] * 16]},)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        first, second = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": first + second, "OUTPUT1": first - second}


class Numbers(weir.Model):
    """Returns as many numbers as a sentence vector has, for as many as a sentence has tokens, and computes for about as long: a server that has to wait
    for its workers runs with cold caches, which trebles what a request costs it."""

    max_batch_size = 8
    seconds = 0.005  # for each row
    matrix = numpy.ones((200, 200), numpy.float32)

    inputs = (weir.Tensor("TOKENS", "INT32", [-1, 20]),)
    outputs = (weir.Tensor("VECTOR", "FP32", [-1, 384]),)
    # Odd multiples of 2**-9, which have as many digits as the shortest of a float32 that texts are answered with: the answers are of one size.
    vector = ((2 * numpy.rint(12.8 * numpy.random.default_rng(0).standard_normal((1, 384))) + 1) / 512).astype(
        numpy.float32
    )

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        end = time.thread_time() + self.seconds * len(batch["TOKENS"])
        while time.thread_time() < end:
            self.matrix @ self.matrix
        return {"VECTOR": self.vector.repeat(len(batch["TOKENS"]), axis=0)}


NAP = 0.0005  # seconds


class Nap(Square):
    """Sleeps as long for any batch: the limit is what reads, queues and writes."""

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(NAP)
        return super().predict(batch)


class SimpleNap(Simple):
    """The same for tensors."""

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(NAP)
        return super().predict(batch)


class Mean(weir.Model):
    """The mean of the first row of each image: next to no work on 602 KB."""

    inputs = (weir.Tensor("IMAGE", "FP32", [-1, 3, 224, 224]),)
    outputs = (weir.Tensor("MEAN", "FP32", [-1, 1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"MEAN": batch["IMAGE"][:, 0, 0].mean(axis=1, keepdims=True, dtype=numpy.float32)}


class Drawn(weir.Model):
    """An image of 602 KB for a number: next to no work for a large response."""

    inputs = (weir.Tensor("SEED", "FP32", [-1, 1]),)
    outputs = (weir.Tensor("IMAGE", "FP32", [-1, 3, 224, 224]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        seeds = batch["SEED"].reshape(-1, 1, 1, 1)
        return {"IMAGE": numpy.broadcast_to(seeds, (len(seeds), 3, 224, 224)).astype(numpy.float32)}


class Slow(weir.Model):
    """Has a known capacity: 8 items in 20 ms."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.02)
        return batch


class Four(Slow):
    """The same with half of it: 4 items in 20 ms."""

    max_batch_size = 4


class Exactly(weir.Model):
    """Takes as long for a batch as TEN_TIMES says, to a few microseconds."""

    max_batch_size = TEN_TIMES.max_batch_size

    def predict(self, batch: list[Any]) -> list[Any]:
        end = time.perf_counter() + TEN_TIMES.service_time_ms[len(batch) - 1] / 1000.0
        time.sleep(end - time.perf_counter() - SLEEP_ERROR)
        while time.perf_counter() < end:
            pass
        return batch


class Sleeps(weir.Model):
    """Sleeps fixed_ms + each_ms·b for a batch of b."""

    max_batch_size = 8
    examples = (3,)

    def __init__(self, fixed_ms: float = 10.0, each_ms: float = 1.0) -> None:
        self.fixed_ms, self.each_ms = fixed_ms, each_ms

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep((self.fixed_ms + self.each_ms * len(batch)) / 1000.0 - SLEPT_LONGER)
        return batch


class Grid(weir.Model):
    """Sums rows of any length: a tensor model that takes whatever shape a stranger sends."""

    inputs = (weir.Tensor("x", "FP32", [-1, -1]),)
    outputs = (weir.Tensor("sum", "FP32", [-1]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["x"].sum(axis=1, dtype=numpy.float32)}


class Words(weir.Model):
    """Counts words; items differ in size, and are measured by the server."""

    def predict(self, batch: list[Any]) -> list[int]:
        return [len(str(item)) for item in batch]

    @classmethod
    def measure(cls, item: Any) -> int:
        return 1 + len(item) // 1000 if isinstance(item, (str, list)) else 1


TOKENS = 128
WORDS = 30_522


class Encoder(weir.Model):
    """The encoder of BERT base (12 layers, 768 wide) on a GPU, with weights at random, in half precision. Token ids in (at most 128 count),
    the first five numbers of the mean vector out: what it computes means nothing, what it costs is what a trained one costs."""

    examples: ClassVar[list[list[int]]] = [list(range(1, TOKENS + 1))]

    def __init__(self, device: str = "cuda", layers: int = 12, width: int = 768) -> None:
        self.device, self.layers, self.width = device, layers, width

    def load(self) -> None:
        import torch  # only in a worker

        self.torch, self.device = torch, self.torch_device(self.device)
        kind = torch.float16 if self.device.startswith("cuda") else torch.float32
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            self.width, self.width // 64, 4 * self.width, activation="gelu", batch_first=True
        )
        encoder = torch.nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)
        self.words = torch.nn.Embedding(WORDS, self.width).to(self.device, kind).eval()
        self.encoder = encoder.to(self.device, kind).eval()

    def predict(self, batch: list[list[int]]) -> list[Any]:
        torch = self.torch
        ids = torch.zeros((len(batch), TOKENS), dtype=torch.long)
        for row, item in enumerate(batch):
            ids[row, : len(item)] = torch.tensor(item[:TOKENS])
        with torch.inference_mode():
            vectors = self.encoder(self.words(ids.to(self.device))).mean(dim=1)[:, :5]
        answers: list[Any] = vectors.float().cpu().tolist()  # waits for the GPU
        return answers


class Sleeper(weir.Model):
    """Sleeps as long as a small text model computes on one core; an item is the number of its tokens. Padding takes as long as tokens."""

    FIXED, PER_TOKEN = 0.001, 20e-6  # seconds
    max_batch_size = 64
    padded = True
    max_padding = FIXED / PER_TOKEN / 2
    workers = 2
    examples = (10,)

    @classmethod
    def measure(cls, item: Any) -> weir.Measure:
        return weir.Measure(cost=float(item))

    def predict(self, batch: list[Any]) -> list[Any]:
        tokens = len(batch) * max(batch) if self.padded else sum(batch)
        time.sleep(max(0.0, self.FIXED + self.PER_TOKEN * tokens - SLEPT_LONGER))
        return batch


class SleeperInOrder(Sleeper):
    """The same without regard to length, and so without padding."""

    padded = False
