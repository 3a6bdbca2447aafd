"""Late interaction (ColBERT): a query and a document each become vectors of their tokens, and the score of both is MaxSim.

What a checkpoint states of it, whichever library saved it, and the score. Sources: Khattab and Zaharia 2020, equation 3; PyLate and sentence-transformers'
MultiVectorEncoder for the markers, the expansion of queries and what does not count in documents.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUERY = -1  # in place of where a second text begins: the tokens are those of a query of late interaction
MAXSIM, MEAN_MAXSIM = "maxsim", "meanmaxsim"  # the names of the scores


@dataclass(frozen=True)
class LateInteraction:
    """How texts become queries and documents.

    Attributes:
        query, document: the text that is put before each; what asks for a query is this prompt.
        query_marker, document_marker: the beginning of that text which is one token, as the files say; "" for none.
        query_length: the most tokens of a query; None for as many as the model reads.
        document_length: the same of a document.
        expands_to: a query is filled up to so many tokens; 0 for none.
        expansion: the token that fills it up; None for the mask.
        attends: whether other tokens attend to those that fill it up.
        skipped: tokens of a document that have no vector.
        mean: whether the score is divided by the number of vectors of the query.
    """

    query: str
    document: str
    query_marker: str = ""
    document_marker: str = ""
    query_length: int | None = None
    document_length: int | None = None
    expands_to: int = 0
    expansion: str | None = None
    attends: bool = False
    skipped: tuple[str, ...] = ()
    mean: bool = False

    @property
    def similarity(self) -> str:
        """The name of the score."""
        return MEAN_MAXSIM if self.mean else MAXSIM


def maxsim(query: NDArray[Any], document: NDArray[Any], *, mean: bool) -> NDArray[np.float32]:
    """Return the score [1] of the vectors [tokens, dimensions] of a query and of a document: the sum, or the `mean`, over the vectors of the query of the
    greatest product with one of the document; 0 if one of both has none."""
    if not len(query) or not len(document):
        return np.zeros(1, np.float32)
    best = (query @ document.T).max(axis=1).astype(np.float64)
    return np.array([best.mean() if mean else best.sum()], np.float32)
