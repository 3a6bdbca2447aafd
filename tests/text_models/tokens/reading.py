"""What tests say of tokenised texts."""

import struct

from weir.errors import InvalidRequest
from weir.text_models.texts import Tokenized


def ids(found: Tokenized | InvalidRequest) -> list[int]:
    """Return the ids of a text that was accepted."""
    assert isinstance(found, Tokenized), found
    return list(struct.unpack(f"<{len(found.ids) // 4}i", found.ids))


def rule(found: Tokenized | InvalidRequest) -> str:
    """Return what an error says."""
    assert isinstance(found, InvalidRequest), found
    return found.message
