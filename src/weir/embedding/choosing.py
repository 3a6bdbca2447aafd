"""What is computed where a user has not said: what the model's files say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from weir.embedding.recipe import WINDOW, Pooling, Precision, Recipe, poolings_named
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint

# A model's files may say that its vectors have length 1. That is not meant of its tokens' vectors, nor of probabilities.
NEVER_NORMALIZED = (Pooling.NONE, Pooling.CLASSIFICATION, Pooling.REGRESSION)


def chosen_recipe(
    checkpoint: "Checkpoint", *, pooling: str | None = None, layers: Sequence[int] | None = None,
    mask_special: bool = False, positions: bool = True, normalize: bool | None = None, dimensions: int | None = None,
    precision: str = "fp32", window: int | None = None,
) -> Recipe:  # fmt: skip
    """Return the recipe that these options make of `checkpoint`: None is what its files say, and the mean where they say nothing.

    Raises SettingsError for a name that is none. Whether the model can do it is said when its runtime is opened.
    """
    try:
        numbers = Precision(precision)
    except ValueError:
        known = ", ".join(each.value for each in Precision)
        raise SettingsError(f"precision={precision!r}: must be one of {known}") from None
    chosen, *joined = checkpoint.poolings or (Pooling.MEAN,) if pooling is None else poolings_named(pooling)
    recipe = Recipe(
        chosen,
        tuple(layers or checkpoint.layers),
        mask_special,
        positions,
        checkpoint.normalize and chosen not in NEVER_NORMALIZED if normalize is None else normalize,
        dimensions,
        numbers,
        tuple(joined),
        window or WINDOW,
    )
    return _shortened(checkpoint, recipe) if dimensions is None else recipe


def _shortened(checkpoint: "Checkpoint", recipe: Recipe) -> Recipe:
    """Keep as many numbers of a vector as the files say (`truncate_dim`). That holds for the vectors that the files describe, and for no others."""
    kept = checkpoint.layout.dimensions
    if kept is None or (recipe.poolings, recipe.layers) != (checkpoint.poolings, checkpoint.layers):
        return recipe
    from weir.embedding.runtime.reading import dimensions_in

    return replace(recipe, dimensions=min(kept, dimensions_in(checkpoint, recipe)))
