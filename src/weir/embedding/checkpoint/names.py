"""Weights' names: each family's own, and the ones they have here.

Here: `embeddings.word|position|type`, `embeddings.norm.weight|bias`; in a layer `layer.0.query|key|value|output`,
`layer.0.attention_norm`, `layer.0.up|down`, `layer.0.norm`, each with `.weight` and `.bias`; `pooler.weight|bias`; `classifier.*`,
`pre_classifier.*`; `relative_bias`. Weights keep torch's layout: outputs first.
"""

from collections.abc import Iterable, Iterator

from weir.errors import SettingsError

WORDS = "embeddings.word_embeddings.weight"

EMBEDDINGS = {
    "embeddings.word": WORDS,
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight": "embeddings.LayerNorm.weight",
    "embeddings.norm.bias": "embeddings.LayerNorm.bias",
}

BERT_LAYER = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense", "down": "output.dense", "norm": "output.LayerNorm",
}  # fmt: skip
LAYERS = {
    "bert": BERT_LAYER,
    "roberta": BERT_LAYER,
    "xlm-roberta": BERT_LAYER,
    "mpnet": BERT_LAYER | {
        "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v",
        "output": "attention.attn.o", "attention_norm": "attention.LayerNorm",
    },
    "distilbert": {
        "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin",
        "output": "attention.out_lin", "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "norm": "output_layer_norm",
    },
}  # fmt: skip

POOLER = {"pooler.weight": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
RELATIVE_BIAS = {"relative_bias": "encoder.relative_attention_bias.weight"}
ONE_LAYER_HEAD = ("classifier.weight", "classifier.bias")
TWO_LAYER_HEAD = (
    "classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias",
)  # fmt: skip
HEADS = {
    "bert": ONE_LAYER_HEAD,
    "roberta": TWO_LAYER_HEAD,
    "xlm-roberta": TWO_LAYER_HEAD,
    "mpnet": TWO_LAYER_HEAD,
    "distilbert": ("pre_classifier.weight", "pre_classifier.bias", *ONE_LAYER_HEAD),
}


class Stored:
    """The names in a model's files: which of them is which weight.

    Models that were saved as part of another one have a prefix (`bert.`, `roberta.`, `0.auto_model.`), and old ones call a
    normalisation's weight and bias gamma and beta.
    """

    def __init__(self, names: Iterable[str], where: str) -> None:
        self.real = {_modern(name): name for name in names}
        self.where = where
        self.prefix = min((name.removesuffix(WORDS) for name in self.real if name.endswith(WORDS)), key=len, default="")

    def has(self, names: dict[str, str]) -> bool:
        """Return whether all of these are there, behind the prefix."""
        return all(self.prefix + name in self.real for name in names.values())

    def head(self, family: str) -> dict[str, str] | None:
        """Return the classifier's names, here and in the files, or None if there is none."""
        for prefix in self._outer_prefixes():
            names = {name: prefix + name for name in HEADS[family]}
            if all(name in self.real for name in names.values()):
                return {here: self.real[name] for here, name in names.items()}
        return None

    def find(self, name: str) -> str:
        """Return the name in the files of what stands behind the prefix. Raises SettingsError where it is missing."""
        if self.prefix + name not in self.real:
            raise SettingsError(
                f"{self.where}: has no weight {self.prefix + name!r}, which the model is not complete without"
            )
        return self.real[self.prefix + name]

    def _outer_prefixes(self) -> Iterator[str]:
        """A classifier stands beside the model, not inside: `bert.` is the prefix of that alone."""
        parts = self.prefix.split(".")[:-1]
        for kept in range(len(parts), -1, -1):
            yield "".join(part + "." for part in parts[:kept])


def names_of(family: str, layers: int) -> dict[str, str]:
    """Return the names, here and in the files behind the prefix, of all weights that a model of the family must have."""
    names = dict(EMBEDDINGS)
    if family in ("mpnet", "distilbert"):
        del names["embeddings.type"]
    if family == "mpnet":
        names |= RELATIVE_BIAS
    root = "transformer.layer" if family == "distilbert" else "encoder.layer"
    for layer in range(layers):
        for here, there in LAYERS[family].items():
            for part in ("weight", "bias"):
                names[f"layer.{layer}.{here}.{part}"] = f"{root}.{layer}.{there}.{part}"
    return names


def _modern(name: str) -> str:
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
