"""Makes of the model that is measured what the peers need: `DIRECTORY PLACE`.

PLACE/vectors is the model with an ONNX file, PLACE/ranker a cross-encoder with its network and a random classifier, and PLACE/both the model with a random
head of BGE-M3's kind for sparse vectors. Random heads take as long as trained ones.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, BertForSequenceClassification

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OPSET = 17


class Named(torch.nn.Module):
    """Calls a network with its inputs in the order of INPUTS, and returns one of its outputs."""

    def __init__(self, network: Any, output: str) -> None:
        super().__init__()
        self.network, self.output = network, output

    def forward(self, *inputs: Any) -> Any:
        """Return the output."""
        return self.network(**dict(zip(INPUTS, inputs, strict=True)))[self.output]


def export(network: Any, tokenizer: Any, output: str, folder: Path) -> None:
    """Write `folder`/model.onnx, with any number of texts of any length."""
    sample = tokenizer(["one text", "and a second, which is longer"], padding=True, return_tensors="pt")
    axes = {0: "batch", 1: "sequence"}
    torch.onnx.export(
        Named(network, output), tuple(sample[name] for name in INPUTS), folder / "model.onnx", input_names=list(INPUTS),
        output_names=[output], opset_version=OPSET, dynamo=False,
        dynamic_axes={**dict.fromkeys(INPUTS, axes), output: axes if output == "last_hidden_state" else {0: "batch"}},
    )  # fmt: skip


def prepare(directory: Path, place: Path) -> None:
    """Write the three models."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shutil.copytree(directory, place / "vectors")
    network = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    export(network, tokenizer, "last_hidden_state", place / "vectors")
    ranker = BertForSequenceClassification.from_pretrained(directory, num_labels=1, attn_implementation="eager").eval()
    ranker.save_pretrained(place / "ranker")
    tokenizer.save_pretrained(place / "ranker")
    export(ranker, tokenizer, "logits", place / "ranker")
    shutil.copytree(directory, place / "both")
    head = {"weight": torch.randn(1, network.config.hidden_size), "bias": torch.zeros(1)}
    torch.save(head, place / "both" / "sparse_linear.pt")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]))
    print("{}")
