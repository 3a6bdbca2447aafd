"""The JSON files of a model's directory, and the architecture of a network.

Errors name the file, the key, the value and the rule.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from weir.text_models.pooling import Pooling


class Rotary(NamedTuple):
    """Rotary positions of one layer: pairs of numbers of queries and keys are turned by an angle that grows with the position.

    Attributes:
        theta: the base of the wavelengths.
        stretch: the factor by which NTK scaling stretches them (1: as trained).
    """

    theta: float
    stretch: float = 1.0


class Distances(NamedTuple):
    """DeBERTa's attention to distances: in addition to words with words, words with distances are compared.

    Attributes:
        span: how many distances to each side have an embedding.
        buckets: how many buckets of distances there are to each side, which widen with the distance; 0 if each distance stands alone.
        longest: the distance at which buckets end.
        to_position, from_position: whether the word of the query is compared with the distance (c2p), and that of the key (p2c).
        shared: whether the matrices for words are those for distances, too.
        normed: whether the embeddings of distances are normalized.
    """

    span: int
    buckets: int
    longest: int
    to_position: bool
    from_position: bool
    shared: bool
    normed: bool


@dataclass(frozen=True)
class Architecture:
    """The architecture of a network: everything that its computation depends on, except the weights.

    Attributes:
        family: one of the values of families.FAMILIES; for the torch runtime any model_type.
        hidden_size, layers, heads, intermediate_size, vocab_size: as in config.json.
        max_length: the most tokens of a text, special tokens included: as many as there are positions.
        position_offset: the token at index p has the position embedding p + position_offset. If the offset is not 0, the token with the id
            position_offset - 1 is padding wherever it stands: that number is also its position, and it is not counted in the indices of others.
        type_vocab_size: how many token types there are; 0 if the network has no token type embeddings.
        epsilon: the constant in layer normalization.
        activation: the activation of the feed-forward layers, by its name in config.json.
        pad_id: the id of the padding token.
        relative_buckets: how many buckets of distances MPNet's attention has; 0 in all other families.
        labels: how many outputs the classifier has; 0 if there is none.
        has_pooler: whether there are weights of a pooler, a dense layer on the first token.
        embedding_size: the size of the embeddings of words if a dense layer makes the hidden size of it, as in ALBERT and ELECTRA; else 0.
        embedding_scale: the factor of the embeddings of words.
        position_table: whether there are position embeddings that are added to those of words.
        shared_layers: whether all layers have the weights of the first, as in ALBERT.
        order: where a layer normalizes: "post", after the sum with the residual (BERT); "pre", before attention and before the feed-forward layers;
            "both", before and after each of the two (Gemma); "static" for a network without layers.
        final_norm: whether the output of the last layer is normalized.
        rms: whether normalization divides by the root of the mean square alone; norm_offset is added to its factors.
        gated: whether the feed-forward layer multiplies an activated gate with a second product.
        key_value_heads: how many heads keys and values have; 0 for as many as queries.
        head_size: the size of a head; 0 for hidden_size / heads.
        query_scale: the factor of products of queries and keys; 0 for 1 / sqrt(head size).
        head_norm: whether queries and keys are normalized head by head.
        rotary: the rotary positions of each layer; empty without.
        windows: for each layer, a token attends to tokens at smaller distances than this, 0 for all; empty if all layers attend to all.
        causal: whether a token attends to no later one.
        alibi: whether a penalty for the distance, of another slope in each head, is added in attention.
        distances: DeBERTa's attention to distances, or None.
        classifier_reads: what a classifier reads of the last layer: the first token, the last one (decoders), the mean (ModernBERT may), or with
            NONE each token, of whose numbers the mean counts (EuroBERT).
        passed_over: the token that does not count as the last one for a classifier, as it is padding wherever it stands; -1 for none.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    vocab_size: int
    max_length: int
    position_offset: int = 0
    type_vocab_size: int = 2
    epsilon: float = 1e-12
    activation: str = "gelu"
    pad_id: int = 0
    relative_buckets: int = 0
    labels: int = 0
    has_pooler: bool = False
    embedding_size: int = 0
    embedding_scale: float = 1.0
    position_table: bool = True
    shared_layers: bool = False
    order: str = "post"
    final_norm: bool = False
    rms: bool = False
    norm_offset: float = 0.0
    gated: bool = False
    key_value_heads: int = 0
    head_size: int = 0
    query_scale: float = 0.0
    head_norm: bool = False
    rotary: tuple[Rotary, ...] = ()
    windows: tuple[int, ...] = ()
    causal: bool = False
    alibi: bool = False
    distances: Distances | None = None
    classifier_reads: Pooling = Pooling.CLS
    passed_over: int = -1

    @property
    def like_bert(self) -> bool:
        """Whether its layers are computed as those of BERT, but for their positions."""
        return self.order == "post" and not (self.gated or self.rotary or self.alibi or self.distances)

    @property
    def size_of_head(self) -> int:
        """The size of a head."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def attended_heads(self) -> int:
        """How many heads keys and values have."""
        return self.key_value_heads or self.heads

    @property
    def scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.query_scale or 1.0 / math.sqrt(self.size_of_head)
