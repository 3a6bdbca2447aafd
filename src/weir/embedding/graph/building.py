"""Build the ONNX graph of a recipe from a checkpoint's weights.

It goes up to the highest layer that the recipe asks for, pools within, and holds nothing that a run need compute again. Inputs, all [batch, length]:
`ids` int32; `mask` int32, 1 for a token; `types` int32, only if the model tells a second text from the first; `pool` float32, how much a token
counts, only if the pooling weighs tokens. Texts are filled up from the right. Output: `vectors` float32, [batch, dimensions], or [batch, length, dimensions] for Pooling.NONE.
"""

from typing import TYPE_CHECKING

from weir.embedding.graph.assembling import Assembly, Graph
from weir.embedding.graph.dense import Numbers
from weir.embedding.graph.encoding import Encoder
from weir.embedding.graph.finishing import Finisher
from weir.embedding.graph.pooling import Pooler
from weir.embedding.graph.refusing import OF_LAST_LAYER, dense_layers, dimensions_of, used_layers
from weir.embedding.recipe import Pooling, Recipe

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint

WEIGHTS = "weights.bin"  # the file beside the graph
VERSION = 5  # of the graphs that this makes; higher with each change, for cached ones are made again then

_OF_FIRST = (Pooling.CLS, *OF_LAST_LAYER)  # poolings that read the first token only


def build(checkpoint: "Checkpoint", recipe: Recipe, device: str = "cpu") -> Graph:
    """Return the graph for a device, cpu or cuda. Its weights belong into a file `WEIGHTS` beside it.

    Raises SettingsError naming what of the recipe the checkpoint cannot do, and the rule.
    """
    dimensions = dimensions_of(checkpoint, recipe, device)
    assembly = Assembly(WEIGHTS)
    numbers = Numbers(assembly, recipe.precision, device)
    weights = checkpoint.weights()
    encoder = Encoder(
        assembly, numbers, checkpoint.architecture, weights, device=device, positions=recipe.positions
    )  # fmt: skip
    layers = used_layers(checkpoint.architecture, recipe)
    values = {layer: encoder.add_layer(layer) for layer in range(max(layers))}
    # Where only the first token of one layer is read, that layer is computed for it alone; on GPUs one fused operator is faster than that.
    of_first = all(pooling in _OF_FIRST for pooling in recipe.poolings)
    first_alone = of_first and len(layers) == 1 and device == "cpu"
    values[max(layers)] = (encoder.add_layer_of_first if first_alone else encoder.add_layer)(max(layers))
    wanted = [values[layer] for layer in layers]
    value = wanted[0] if len(wanted) == 1 else assembly.add("Concat", *wanted, axis=-1)
    if not first_alone:
        value = encoder.rows.spread(value)
    if numbers.dtype != "float32":
        value = numbers.cast(value, "float32")
    finisher, pooler = Finisher(assembly, numbers, weights), Pooler(assembly, value, recipe.window)
    value = _pooled(finisher, pooler, recipe)
    value = finisher.dense(value, dense_layers(checkpoint, recipe))
    if recipe.dimensions is not None:
        value = finisher.cut(value, dimensions)
    if recipe.normalize:
        value = finisher.normalize(value)
    assembly.add("Identity", value, result="vectors")
    each = ("batch", "length") if recipe.pooling is Pooling.NONE else ("batch",)
    return assembly.finish("sentence-encoder", "vectors", (*each, dimensions))


def _pooled(finisher: Finisher, pooler: Pooler, recipe: Recipe) -> str:
    if recipe.pooling not in OF_LAST_LAYER:
        return pooler.add_all(recipe.poolings)
    if recipe.pooling is Pooling.POOLER:
        return finisher.pooler(pooler.first())
    return finisher.classifier(pooler.first(), recipe.pooling)
