"""Small models of each family with random weights, and texts for them as token ids: always the same, so that vectors are all that is kept."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tests.text_models import tiny

from weir.text_models import WITH_HEAD, Pooling, Recipe

FAMILIES = tiny.FAMILIES
VOCABULARY, LABELS = 90, 3
LONGEST = {"mpnet": 160}  # beyond the distance from which all are the same
HEADS = (Pooling.CLASSIFICATION, Pooling.REGRESSION, Pooling.LOGITS)


class Case(NamedTuple):
    """A recipe by the name of its reference."""

    name: str
    recipe: Recipe


def cases(family: str) -> list[Case]:
    """Return the recipes that there are references for."""
    found = [
        Case(pooling.value, Recipe(pooling))
        for pooling in Pooling
        if not (family == "distilbert" and pooling is Pooling.POOLER)
        and pooling is not Pooling.HIERARCHICAL  # no library has it: test_building.py
        and pooling is not Pooling.LOGITS  # what the other heads are made of
        and pooling
        not in (*WITH_HEAD, Pooling.PROJECTION)  # heads of their own, which these models lack: test_heads.py
    ]
    masked = (Pooling.NONE, Pooling.MEAN, Pooling.MAX, Pooling.MEAN_MAX, Pooling.WEIGHTED_MEAN, Pooling.MEAN_SQRT)
    found += [Case(f"{pooling.value} without special tokens", Recipe(pooling, mask_special=True)) for pooling in masked]
    found.append(Case("mean of layer -2", Recipe(Pooling.MEAN, layers=(-2,))))
    found.append(Case("mean-max of layers -1 -3", Recipe(Pooling.MEAN_MAX, layers=(-1, -3))))
    found.append(Case("mean without positions", Recipe(Pooling.MEAN, positions=False)))
    return found


def texts(family: str) -> list[NDArray[np.int32]]:
    """Return texts as token ids, special ones (0 and 2) included; no other is a special one, nor the padding (1)."""
    random = np.random.RandomState(7)
    lengths = [3, 8, 5, 24, LONGEST.get(family, 40)]
    return [np.array([0, *random.randint(5, VOCABULARY, length - 2), 2], dtype=np.int32) for length in lengths]


def second_texts(family: str) -> list[int]:
    """Return where the second text of each begins, 0 where there is only one."""
    return [0, 4, 0, 10, 0] if family == "bert" else [0] * 5


def write_model(directory: Path, family: str, *, labels: int = 0) -> Path:
    """Write a model, with a classifier if it has labels and else a pooler where the family has one. All other weights are the same in both."""
    positions = LONGEST.get(family, 40) + (0 if family in ("bert", "distilbert") else 2)
    return tiny.model(
        directory, family, labels=labels, tokenizer=False, seed=FAMILIES.index(family), vocab_size=VOCABULARY, pad_token_id=1,
        max_position_embeddings=positions,
    )  # fmt: skip
