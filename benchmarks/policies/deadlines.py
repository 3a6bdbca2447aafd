"""Models on one device by the order of their first requests, as a few lines of a loop that shares no code with the batcher."""

from collections.abc import Callable, Sequence

from weir.policy.cost import Profile

Rank = Callable[[float, float], float]  # (arrival, timeout) -> the model whose first request has the lowest is next


def by_deadline(arrival: float, timeout: float) -> float:
    """Earliest deadline first."""
    return arrival + timeout


def by_arrival(arrival: float, timeout: float) -> float:
    """Oldest first."""
    return arrival


def late_shares(
    profiles: Sequence[Profile], arrivals: Sequence[Sequence[float]], timeouts: Sequence[float], rank: Rank
) -> list[float]:
    """Return for each model the share of its requests that are not done within its timeout of their arrival; in seconds.

    Batches are as large as they can be. A request that could not be done in time even alone is left out.
    """
    times = [(each.service_time_ms / 1000.0).tolist() for each in profiles]
    served, late, now = [0] * len(times), [0] * len(times), 0.0
    while True:
        waiting = []
        for k, (own, timeout) in enumerate(zip(arrivals, timeouts, strict=True)):
            while served[k] < len(own) and own[served[k]] + timeout < now + times[k][0]:
                served[k] += 1
                late[k] += 1
            if served[k] < len(own):
                waiting.append((own[served[k]], k))
        if not waiting:
            return [count / len(own) for count, own in zip(late, arrivals, strict=True)]
        here = [(rank(arrival, timeouts[k]), k) for arrival, k in waiting if arrival <= now]
        if not here:
            now = min(waiting)[0]
            continue
        k = min(here)[1]
        own, first = arrivals[k], served[k]
        while served[k] < len(own) and own[served[k]] <= now and served[k] - first < len(times[k]):
            served[k] += 1
        now += times[k][served[k] - first - 1]
        late[k] += sum(arrival + timeouts[k] < now for arrival in own[first : served[k]])
