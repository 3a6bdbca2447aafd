"""An Observer that ignores everything, for those that hear only some of it."""

from collections.abc import Sequence

from weir.errors import ModelError, WeirError
from weir.messages import Dispatch, Request, Timing


class SilentObserver:
    """Subclass it and override what you want to hear."""

    def refused(self, model: str, door: str, error: WeirError) -> None:
        """Ignore it."""

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        """Ignore it."""

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Ignore it."""

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        """Ignore it."""

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Ignore it."""

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """Ignore it."""

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Ignore it."""

    def transferred(self, model: str, door: str, received_bytes: int, sent_bytes: int) -> None:
        """Ignore it."""
