"""Tells how long to wait before something that failed is tried again."""


class Backoff:
    """Says how many seconds to wait before a worker is started again, from how often it has died or failed since it last succeeded.

    After the first death the wait is 0, after the next one `first`, then twice as long each time. It is at most `longest` seconds after a failure to load,
    and at most `longest_after_load` after the death of a worker that had loaded: its model is healthy, and requests are refused meanwhile. There is always
    another try, because what a model needs to load may be there again. After `patience` failures to load in a row no request should wait for it.
    """

    def __init__(
        self, *, first: float = 0.1, longest: float = 30.0, longest_after_load: float = 1.0, patience: int = 5
    ) -> None:
        self._first = first
        self._longest = longest
        self._longest_after_load = longest_after_load
        self._patience = patience
        self.deaths = 0
        self._failures = 0
        self._refusals = 0

    def died(self, *, suspect: bool) -> float:
        """Return how many seconds to wait after a ready worker died.

        `suspect`: it was running entries whose worker had died before. Then the death was probably caused by a request, and does not count.
        """
        if suspect:
            return 0.0
        self.deaths += 1
        return min(self._wait(self.deaths - 1), self._longest_after_load)

    @property
    def failures(self) -> int:
        """The number of loads that have failed in a row."""
        return self._failures

    @property
    def keeps_failing(self) -> bool:
        """Whether it has failed to load so often that no request should wait for it."""
        return self._failures >= self._patience

    def failed_to_load(self) -> float:
        """Return how many seconds to wait after a worker failed to load."""
        self._failures += 1
        return self._wait(self._failures)

    def refused(self) -> float:
        """Return how many seconds to wait after the system refused a process. That is not a failure of the model."""
        self._refusals += 1
        return self._wait(self._refusals)

    def loaded(self) -> None:
        """Note that the worker has loaded: the failures to load and the refusals are forgotten."""
        self._failures = self._refusals = 0

    def finished(self) -> None:
        """Note that a batch was finished: the deaths are forgotten."""
        self.deaths = 0

    def _wait(self, earlier: int) -> float:
        # Beyond 2**30 times `first` the limit has long been reached, whatever it is.
        return 0.0 if earlier == 0 else min(self._first * 2.0 ** min(earlier - 1, 30), self._longest)
