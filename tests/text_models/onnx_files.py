"""ONNX files as repositories have them: real networks of tiny models, exported with the inputs and outputs that optimum writes."""

from pathlib import Path
from typing import Any

import onnx

from weir.text_models import Pooling, Precision
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.graph import Assembly, Numbers, Output
from weir.text_models.graph.building import WEIGHTS, OutputLayers, write
from weir.text_models.graph.layers import EncoderLayers

NAMES = {"ids": "input_ids", "mask": "attention_mask", "types": "token_type_ids"}


def export(
    model: Path, path: Path, output: str = "last_hidden_state", *, beside: bool = False, stray: str = ""
) -> Path:
    """Write the network of a model like BERT as an ONNX file, whose weights are in a file beside it if `beside`. Return its path.

    `output` is what it makes: last_hidden_state, sentence_embedding (of the first token) or logits. `stray` is an input that no text has.
    """
    checkpoint = read_checkpoint(model)
    architecture, weights = checkpoint.architecture, checkpoint.weights()
    assembly = Assembly(WEIGHTS)
    numbers = Numbers(assembly, Precision.FP32, "cpu")
    encoder = EncoderLayers(assembly, numbers, architecture, weights, device="cpu", positions=True)
    for layer in range(architecture.layers):
        encoder.add_layer(layer)
    tokens = encoder.rows.unpack(encoder.value)
    first = assembly.add("Gather", tokens, assembly.constant(0, "int64"), axis=1)
    size = architecture.hidden_size
    made = {
        "last_hidden_state": Output(tokens, ("batch", "length", size)),
        "sentence_embedding": Output(first, ("batch", size)),
    }
    if output == "logits":
        read = OutputLayers(assembly, numbers, weights, architecture.epsilon)
        made[output] = Output(
            read.classifier(first, Pooling.LOGITS, architecture.family), ("batch", architecture.labels)
        )
    if stray:
        tokens = assembly.add("Add", tokens, assembly.input(stray, "float32", ("batch",)))
        made["last_hidden_state"] = Output(tokens, ("batch", "length", size))
    aside = path.parent / "aside"
    aside.mkdir(parents=True)
    graph: Any = onnx.load(write(assembly.finish("export", {output: made[output]}), aside))
    for each in [*graph.graph.input, *graph.graph.node]:
        if isinstance(each, onnx.ValueInfoProto):
            each.name = NAMES.get(each.name, each.name)
        else:
            each.input[:] = [NAMES.get(name, name) for name in each.input]
    onnx.save_model(graph, path, save_as_external_data=beside, location=f"{path.name}_data", size_threshold=1024)
    for file in aside.iterdir():
        file.unlink()
    aside.rmdir()
    return path
