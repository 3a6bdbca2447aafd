"""JSON as callers send it: what cannot be read is refused, and half of a surrogate pair by the place where it stands."""

from typing import Any

import msgspec

from weir.errors import InvalidRequest
from weir.wire.surrogates import find_half


def read_json(body: bytes) -> Any:
    """Return what `body` says. Raises InvalidRequest saying what is wrong; its details name the field (`param`) if it is one's."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = find_half(body)
        if half is None:
            raise InvalidRequest(f"body: is not JSON ({error})") from error
        param = half.where.partition("[")[0] or None
        raise InvalidRequest(str(half), details={"param": param}) from error
