"""How long to wait before a worker is started again. Pure: counts in, seconds out."""


class Backoff:
    """Counts the deaths of one worker since it last did any good.

    The first death costs no wait; the next ones `first`, then twice as long each, at most `longest` seconds. There is always
    a further try: what a model needs to load may be there again. After `patience` failures to load in a row nobody should
    wait for it.
    """

    def __init__(self, *, first: float = 0.1, longest: float = 30.0, patience: int = 5) -> None:
        self._first = first
        self._longest = longest
        self._patience = patience
        self._deaths = 0
        self._failures = 0
        self._refusals = 0

    def died(self, *, suspect: bool) -> float:
        """Return how long to wait after a ready worker died.

        `suspect`: it was running what had ended a worker before. Such a death is the request's doing and is not counted.
        """
        if suspect:
            return 0.0
        self._deaths += 1
        return self._wait(self._deaths - 1)

    @property
    def failures(self) -> int:
        """How often in a row it has not become ready."""
        return self._failures

    @property
    def keeps_failing(self) -> bool:
        """Whether it has failed to load so often that nobody should wait for it."""
        return self._failures >= self._patience

    def failed_to_load(self) -> float:
        """Return how long to wait after a worker did not become ready."""
        self._failures += 1
        return self._wait(self._failures)

    def refused(self) -> float:
        """Return how long to wait after the system refused a process. That passes, and says nothing of the model."""
        self._refusals += 1
        return self._wait(self._refusals)

    def loaded(self) -> None:
        """Forget the failures to load, and the refusals."""
        self._failures = self._refusals = 0

    def finished(self) -> None:
        """Forget the deaths: a batch was finished."""
        self._deaths = 0

    def _wait(self, earlier: int) -> float:
        # Beyond 2**30 times `first` the limit has long been reached, whatever it is.
        return 0.0 if earlier == 0 else min(self._first * 2.0 ** min(earlier - 1, 30), self._longest)
