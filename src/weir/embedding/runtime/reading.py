"""A model's directory, read for a runtime: torch takes models of architectures of which we know no more than their sizes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.embedding.checkpoint.architecture import FAMILIES, SIZES, Architecture
from weir.embedding.checkpoint.documents import Document, read_document
from weir.embedding.checkpoint.layout import read_layout
from weir.embedding.checkpoint.reading import CONFIG, Checkpoint, longest_text, read_checkpoint
from weir.embedding.checkpoint.weights import Store
from weir.embedding.graph.refusing import dimensions_of
from weir.embedding.recipe import Precision

if TYPE_CHECKING:
    from weir.embedding.recipe import Recipe

# Further names of what SIZES names, in other families.
MORE_NAMES = {
    "hidden_size": ("d_model",),
    "layers": ("num_layers",),
    "heads": ("num_heads",),
    "intermediate_size": ("d_ff",),
}


def read_for(kind: str, directory: Path) -> Checkpoint:
    """Return what is in `directory`, for the runtime `kind`.

    The torch runtime takes any architecture; what vectors it makes is up to transformers. Raises SettingsError as read_checkpoint does.
    """
    directory = Path(directory).resolve()
    if kind != "torch":
        return read_checkpoint(directory)
    layout = read_layout(directory)
    path = layout.network / CONFIG
    if not path.is_file() or not _is_other(read_document(path)):
        return read_checkpoint(directory)
    store = Store(layout.network)
    architecture = _architecture(read_document(path), store)
    return Checkpoint(
        directory=directory,
        architecture=architecture,
        normalize=layout.normalize,
        layers=layout.layers(architecture.layers),
        max_length=longest_text(layout, architecture),
        prompts=layout.prompts,
        default_prompt=layout.default_prompt,
        dense=layout.dense,
        layout=layout,
        store=store,
    )


def dimensions_in(checkpoint: Checkpoint, recipe: "Recipe") -> int:
    """Return how many numbers a vector has, whatever it is computed in. Raises SettingsError as dimensions_of does."""
    return dimensions_of(checkpoint, replace(recipe, precision=Precision.FP32))


def _is_other(config: Document) -> bool:
    return (
        config.text("model_type") not in FAMILIES
        or config.text("position_embedding_type", default="absolute") != "absolute"
    )


def _architecture(config: Document, store: Store) -> Architecture:
    if config.switch("is_encoder_decoder"):
        raise config.wrong(
            "is_encoder_decoder",
            True,
            f"must be false: {config.text('model_type')} has a decoder too, which is not served",
        )
    needed = {"hidden_size", "layers", "vocab_size"}
    sizes: dict[str, Any] = {
        name: config.integer(*keys, *MORE_NAMES.get(name, ()), default=None if name in needed else 1)
        for name, keys in SIZES.items()
    }
    labels = config.values.get("id2label")
    classifies = any("classifier" in name or name.startswith("score") for name in store.files)
    return Architecture(
        family=config.text("model_type"),
        **sizes,
        max_length=config.integer("max_position_embeddings", "n_positions", default=512),
        type_vocab_size=config.integer("type_vocab_size", default=0, least=0),
        pad_id=config.integer("pad_token_id", default=0, least=0),
        labels=0 if not classifies else len(labels) if isinstance(labels, dict) else 2,
        has_pooler=any(".pooler." in f".{name}" for name in store.files),
    )
