"""A transformer on a GPU: the encoder of BERT base (12 layers, 768 wide), with weights at random, in half precision.

What it computes means nothing; what it costs is what a trained one costs. torch is imported only in a worker.
"""

from typing import Any, ClassVar

import weir

TOKENS = 128
WORDS = 30_522


class Encoder(weir.Model):
    """Token ids in (at most 128 count), the first five numbers of the mean vector out."""

    examples: ClassVar[list[list[int]]] = [list(range(1, TOKENS + 1))]

    def __init__(self, device: str = "cuda", layers: int = 12, width: int = 768) -> None:
        self.device, self.layers, self.width = device, layers, width

    def load(self) -> None:
        import torch

        self.torch = torch
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
