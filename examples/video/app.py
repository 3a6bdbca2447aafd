"""Both models in one server."""

import os
from collections.abc import Sequence
from typing import Any

from examples.video.models import Images, Video

import weir


def services(hosts: Sequence[str], ledger: str = "", videos: int = 4) -> list[weir.Service]:
    """Return the image model in a worker process, and the video model, which reads `videos` at a time from `hosts`."""
    images = Images(name="colours", params={"ledger": ledger})
    video = weir.Service(
        Video, name="video", executor="thread", workers=videos, params={"images": images, "hosts": list(hosts)}
    )
    return [images, video]


def make() -> Any:
    """Return the ASGI application; VIDEO_HOSTS says, separated by commas, where videos may be read from."""
    return weir.asgi(*services([host for host in os.environ.get("VIDEO_HOSTS", "").split(",") if host]))
