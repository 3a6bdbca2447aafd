"""From which pages a browser may call."""

from collections.abc import Sequence
from urllib.parse import urlsplit


def allowed(origins: Sequence[str], host: str, cors_origins: Sequence[str]) -> bool:
    """Tell whether a connection may be opened: by whoever is no browser and so names no origin, by a page of this very server,
    and by pages of `cors_origins`. Browsers ask nobody before they open a WebSocket, so the server has to look."""
    if not origins or "*" in cors_origins:
        return True
    return len(origins) == 1 and (origins[0] in cors_origins or urlsplit(origins[0]).netloc.lower() == host.lower())
