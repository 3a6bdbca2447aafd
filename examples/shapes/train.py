"""Draws shapes, trains a small network on them, and writes shapes.onnx and a picture of each shape to try."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw

SIZE, HIDDEN = 28, 64
NAMES = ("circle", "square", "triangle")


def draw(name: str, random: np.random.Generator) -> Image.Image:
    """Return a white shape on black, of any size, somewhere near the middle."""
    picture = Image.new("L", (SIZE, SIZE))
    pen = ImageDraw.Draw(picture)
    radius = random.integers(6, 12)
    x, y = random.integers(12, 17, size=2)
    if name == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=255)
    else:
        box = (x - radius, y - radius, x + radius, y + radius)
        (pen.ellipse if name == "circle" else pen.rectangle)(box, fill=255)
    return picture


def examples(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (count x 784) from 0 to 1, and the number of each shape's name."""
    labels = random.integers(len(NAMES), size=count)
    pictures = [np.asarray(draw(NAMES[label], random), "float32").ravel() / 255 for label in labels]
    return np.stack(pictures), labels


def forward(layers: list[np.ndarray], pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the hidden layer says, and the probability of each shape."""
    hidden = np.maximum(pixels @ layers[0] + layers[1], 0)
    scores = hidden @ layers[2] + layers[3]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def batches(count: int, size: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield indices of the examples, mixed anew in each of 20 rounds."""
    for _ in range(20):
        yield from np.array_split(random.permutation(count), count // size)


def train(random: np.random.Generator) -> list[np.ndarray]:
    """Return the weights and biases of two layers, found by gradient descent with momentum."""
    pixels, labels = examples(3000, random)
    wanted = np.eye(len(NAMES), dtype="float32")[labels]
    layers = [
        random.normal(0, 0.05, (SIZE * SIZE, HIDDEN)), np.zeros(HIDDEN),
        random.normal(0, 0.1, (HIDDEN, len(NAMES))), np.zeros(len(NAMES)),
    ]  # fmt: skip
    speed = [np.zeros_like(layer) for layer in layers]
    for chosen in batches(len(pixels), 50, random):
        hidden, scores = forward(layers, pixels[chosen])
        above = (scores - wanted[chosen]) / len(chosen)
        below = (above @ layers[2].T) * (hidden > 0)
        slopes = [pixels[chosen].T @ below, below.sum(axis=0), hidden.T @ above, above.sum(axis=0)]
        for layer, moving, slope in zip(layers, speed, slopes, strict=True):
            moving *= 0.9
            moving -= 0.05 * slope
            layer += moving
    return [layer.astype("float32") for layer in layers]


def as_onnx(layers: list[np.ndarray]) -> onnx.ModelProto:
    """Return the network as an ONNX model: `pixels` (n x 784) in, `scores` (n x 3) out."""
    names = ("w1", "b1", "w2", "b2")
    nodes = [
        helper.make_node("Gemm", ["pixels", "w1", "b1"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"]),
    ]
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", SIZE * SIZE])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", len(NAMES)])
    weights = [numpy_helper.from_array(layer, name) for name, layer in zip(names, layers, strict=True)]
    graph = helper.make_graph(nodes, "shapes", [pixels], [scores], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    random = np.random.default_rng(1)
    layers = train(random)
    onnx.save(as_onnx(layers), "shapes.onnx")
    for name in NAMES:
        draw(name, random).save(f"{name}.png")
    pixels, labels = examples(1000, random)
    right = (forward(layers, pixels)[1].argmax(axis=1) == labels).mean()
    print(f"shapes.onnx: {right:.0%} of 1,000 new pictures are right; circle.png, square.png, triangle.png to try")
