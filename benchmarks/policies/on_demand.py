"""`python -m benchmarks.policies.on_demand`: seconds that reloads take on ten shapes of traffic, beside those of LRU at equal memory; and how long
others wait beside a client that asks for many models.

The residents are those of the server, in virtual time: a load takes no time in the first part, but its seconds count.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from weir.policy.residency import Key, Presence, Residents, Room

MODELS, ROOM, REQUESTS = 1000, 50.0, 8000  # ROOM in mean models
Order = Sequence[int]  # the models of the requests, one after the other


class Fleet(NamedTuple):
    """The sizes of all models, whose mean is 1, and the seconds that their loads take."""

    sizes: list[float]
    seconds: list[float]


def fleet(seed: int = 1) -> Fleet:
    """Draw models whose sizes differ by up to 1 : 10, and whose loads take longer the larger they are, but not only that."""
    rng = np.random.default_rng([seed, 0])
    sizes = np.exp(rng.normal(0.0, 0.7, MODELS))
    seconds = np.exp(rng.normal(0.0, 0.5, MODELS)) * np.sqrt(sizes)
    return Fleet((sizes / sizes.mean()).tolist(), seconds.tolist())


def popularity(rng: np.random.Generator, exponent: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return Zipf's shares in random order."""
    shares = 1.0 / np.arange(1, MODELS + 1) ** exponent
    return rng.permutation(shares / shares.sum())


def steady(rng: np.random.Generator, exponent: float = 1.0) -> Order:
    """Models of a constant popularity."""
    return list(rng.choice(MODELS, REQUESTS, p=popularity(rng, exponent)))


def drifting(rng: np.random.Generator) -> Order:
    """Every hundred requests, a fifth of the models change places."""
    shares, order = popularity(rng, 1.0), []
    for _ in range(REQUESTS // 100):
        moving = rng.choice(MODELS, MODELS // 20, replace=False)
        shares[moving] = shares[rng.permutation(moving)]
        order += list(rng.choice(MODELS, 100, p=shares))
    return order


def shifting(rng: np.random.Generator) -> Order:
    """Four times, all popularities are drawn anew."""
    return [each for _ in range(4) for each in rng.choice(MODELS, REQUESTS // 4, p=popularity(rng, 1.0))]


def alternating(rng: np.random.Generator) -> Order:
    """Two popularities take turns, as by day and by night."""
    both = popularity(rng, 1.2), popularity(rng, 1.2)
    return [each for part in range(10) for each in rng.choice(MODELS, REQUESTS // 10, p=both[part % 2])]


def sessions(rng: np.random.Generator, at_once: int, length: int) -> Order:
    """So many users at a time, each of whom stays with one model for a while."""
    shares = popularity(rng, 1.0)
    models = list(rng.choice(MODELS, at_once, p=shares))
    order = []
    for _ in range(REQUESTS):
        user = int(rng.integers(at_once))
        order.append(models[user])
        if rng.random() < 1.0 / length:
            models[user] = rng.choice(MODELS, p=shares)
    return order


def scanning(rng: np.random.Generator) -> Order:
    """Constant popularity, and now and then a request to each of many models."""
    order = list(steady(rng))
    for start in range(0, REQUESTS, 2000):
        order[start : start + 200] = range(start // 10, start // 10 + 200)
    return [each % MODELS for each in order]


def looping(rng: np.random.Generator) -> Order:
    """One after the other, of more than there is room for."""
    return [number % 80 for number in range(REQUESTS)]


SHAPES: dict[str, Callable[[np.random.Generator], Order]] = {
    "Zipf": steady,
    "Zipf, flat (0.6)": lambda rng: steady(rng, 0.6),
    "Zipf, steep (1.4)": lambda rng: steady(rng, 1.4),
    "Zipf with drift": drifting,
    "sudden changes": shifting,
    "day and night": alternating,
    "one session after the other": lambda rng: sessions(rng, 1, 8),
    "twenty sessions at a time": lambda rng: sessions(rng, 20, 20),
    "scans": scanning,
    "a loop": looping,
}


def by_index(order: Order, times: Sequence[float], models: Fleet) -> float:
    """Return the seconds of all loads but the first of each model, as the server decides."""
    core, known, total = Residents(Room(ROOM, inf)), set[int](), 0.0
    for model, size in enumerate(models.sizes):
        core.add(model, Room(size, 0.0))
    arrived = [0] * MODELS
    for model, now in zip(order, times, strict=True):
        arrived[model] += 1
        core.models[model].observe(now, arrived[model])
        if core.models[model].presence is not Presence.LOADED:
            core.ask(model, inf, now)
        while (step := core.next_step(now, lambda _: True, lambda key: core.models[key].waiters)) is not None:
            for each in step.leave:
                core.leave(each, now, "")
                core.left(each, now)
            if not step.leave:
                loads = int(str(step.load))
                core.begin(loads, now)
                core.loaded(loads, Room(models.sizes[loads], 0.0), now)
                core.models[loads].load_seconds = models.seconds[loads]
                total += models.seconds[loads] if loads in known else 0.0
                known.add(loads)
    return total


def by_age(order: Order, models: Fleet) -> float:
    """Return the same for LRU: the model goes whose last request is the oldest."""
    loaded, known, total = dict[int, None](), set[int](), 0.0
    for model in order:
        if model in loaded:
            del loaded[model]
        else:
            total += models.seconds[model] if model in known else 0.0
            known.add(model)
            while loaded and sum(models.sizes[each] for each in loaded) + models.sizes[model] > ROOM:
                del loaded[next(iter(loaded))]
        loaded[model] = None
    return total


def shares(seed: int = 1) -> dict[str, float]:
    """Return, by shape, the seconds of the server's reloads as a share of LRU's."""
    models, found = fleet(seed), {}
    for number, (name, draw) in enumerate(SHAPES.items()):
        rng = np.random.default_rng([seed, number + 1])
        order = [int(each) for each in draw(rng)]
        times = np.cumsum(rng.exponential(1.0, len(order))).tolist()
        found[name] = by_index(order, times, models) / by_age(order, models)
    return found


# A client asks for each of GREEDY models once, of which each loads in a second, and room is for five. Others use four and ask for new ones.
GREEDY, BEGINS, ENDS, PATIENCE = 120, 20.0, 80.0, 30.0  # seconds, but the first
Asks = list[tuple[float, str, str]]  # when, for which model, by whom


def of_others() -> Asks:
    """Return what others ask for: four models about once a second, and every five seconds one that nobody has asked for."""
    rng = np.random.default_rng(1)
    used = [(at, f"used {each}", "other") for each in range(4) for at in np.cumsum(rng.exponential(1.0, int(ENDS)))]
    return [*used, *((at, f"new {at:.0f}", "other") for at in np.arange(BEGINS + 1.0, ENDS - PATIENCE, 5.0))]


class Waits(NamedTuple):
    """How long others wait for their answers, in seconds; inf for what is refused. And how many loads the client had."""

    used: list[float]
    new: list[float]
    loads: int


def beside(greedy: str | None) -> Waits:
    """Let others ask beside a client that has this API key; None: beside none."""
    core, found = Residents(Room(5.0, inf), 2), Waits([], [], 0)
    asks = of_others() + [(BEGINS, f"greedy {each}", greedy) for each in range(GREEDY) if greedy is not None]
    events = [
        (at, 1, name, key) for at, name, key in asks
    ]  # 0: a load ends; without a name it is looked again whether there is a step
    heapify(events)
    waiting: dict[Key, list[tuple[float, str]]] = {}
    loads = 0
    while events:
        now, kind, name, key = heappop(events)
        model = (core.models.get(name) or core.add(name, Room(1.0, 0.0))) if name else None
        if kind == 0:
            core.loaded(name, Room(1.0, 0.0), now)
            for at, _ in waiting.pop(name, []):
                _note(found, name, now - at if now < at + PATIENCE else inf)
        elif model is not None:
            model.observe(now, model.arrivals + 1)
            if model.presence is Presence.LOADED:
                _note(found, name, 0.0)
            elif core.ask(name, now + PATIENCE, now, key) is None:
                waiting.setdefault(name, []).append((now, key))
            else:
                _note(found, name, inf)

        def waiters(key: Key, now: float = now) -> dict[str, float]:
            return {caller: at + PATIENCE for at, caller in reversed(waiting.get(key, [])) if now < at + PATIENCE}

        while (step := core.next_step(now, lambda _: True, waiters)) is not None:
            for each in step.leave:
                core.leave(each, now, "")
                core.left(each, now)
            if not step.leave:
                core.begin(step.load, now)
                loads += str(step.load).startswith("greedy")
                heappush(events, (now + 1.0, 0, str(step.load), ""))
        if core.step_at is not None and not any(name == "" for _, _, name, _ in events):
            heappush(events, (core.step_at, 1, "", ""))
    return found._replace(loads=loads)


def _note(found: Waits, name: str, seconds: float) -> None:
    kind = name.partition(" ")[0]
    if kind != "greedy":
        (found.used if kind == "used" else found.new).append(seconds)


def greed() -> str:
    """Return how long others wait as a table."""
    rows = [
        "| beside | in use: reloads | in use: mean wait, s | new: mean wait, s | new: refused | loads of the client |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, key in {"nobody": None, "it, with the same key": "other", "it, with a key of its own": "greedy"}.items():
        found = beside(key)
        had = [each for each in found.new if each < inf]
        reloads = sum(each > 0 for each in found.used)
        rows.append(
            f"| {name} | {reloads} of {len(found.used)} | {np.mean(found.used):.2f} | {np.mean(had or [inf]):.1f} | {found.new.count(inf)} of {len(found.new)} | {found.loads} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(greed(), end="\n\n")
    seen = [shares(seed) for seed in (1,)]
    print("| traffic | reload seconds, LRU = 1 |\n| --- | --- |")
    for name in SHAPES:
        print(f"| {name} | {np.mean([each[name] for each in seen]):.2f} |")
    print(f"| mean | {np.mean([list(each.values()) for each in seen]):.2f} |")
