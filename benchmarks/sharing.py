"""What clients of texts get beside each other, by how many texts their requests have. `python -m benchmarks.sharing [--live] [--keep NAME]`.

Half of 32 clients ask for 16 texts at a time, the others for another number, each again as soon as it has its answer: how long a request takes is
to grow with its size, without a step. Then 13 clients keep many texts in flight each, in requests of 1, 2, 4 ... 4,096: each is to get as many
sentences a second. Without --live it is virtual time: the real encoder, batcher and shares, and workers that only take their time. With --live
a server computes all-MiniLM-L6-v2, and the second is asked over ZeroMQ by nine clients at once, so that a busy machine is as busy for each. --keep writes what was measured to sharing.json under that name (`before`, `after`), and draws
docs/pictures/sharing.png of both.
"""

import argparse
import asyncio
import heapq
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
from rich.console import Console
from rich.table import Table

from weir import Model, Service
from weir.bench.vectors import RunningServer, text_server
from weir.errors import DeadlineExceeded, WeirError
from weir.messages import Batch
from weir.testing import FakeClock, FakeExecutor, whole
from weir.text_models.texts import Text, TokenRule
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.texts import TextQuery
from weir.text_server.tokenizing import TokenizerThreads

KEPT = Path(__file__).with_name("sharing.json")
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "sharing.png"
SIZES = (1, 2, 4, 8, 12, 15, 16, 17, 18, 20, 24, 32, 64, 128, 256, 1024, 4096)
LIVE_SIZES = (8, 16, 17, 20, 64)
REFERENCE = 16  # texts in a request of the others
CLIENTS = 16  # of each kind
EQUALS = tuple(2**power for power in range(13))
LIVE_EQUALS = (1, 4, 16, 17, 20, 64, 256, 1024, 4096)
LIVE_UNDER_WAY = 512  # texts of each of these: what is on its way to the client or back does not wait for a share
UNDER_WAY = 128  # texts that each of these clients keeps under way, or one request of more
WORKERS, TOKENS_PER_SECOND = 2, 4000.0
PRICE, PADDING_SHARE, BUDGET = 25.0, 0.2, 512.0  # of a batch in tokens, as measured of all-MiniLM-L6-v2 on a CPU
SHORTEST, LONGEST = 8, 40  # tokens of a text
WORTH = 1_024  # texts that each client is to have had in virtual time, or WHOLE requests
WHOLE = 4
WARM = 0.2  # of the time does not count
SETTLED = 12  # turns of the loop in which all that follows from something has happened
TIMEOUT = 30.0


class Request(NamedTuple):
    """One request that had its end."""

    size: int
    sent: float
    took: float


class Virtual:
    """A server of texts in virtual time: closed loops of clients, and workers that take as long as their batches cost."""

    def __init__(self) -> None:
        self.clock, self.executor = FakeClock(), FakeExecutor(workers=WORKERS)
        self.requests: list[Request] = []
        self.late = 0
        self.answered: defaultdict[int, int] = defaultdict(int)  # texts, by client
        self._chance = random.Random(7)
        self._numbers = count()
        self._ends: list[tuple[float, int, int, Batch]] = []

    async def run(self, sizes: Sequence[int], seconds: float, *, named: bool, within: float = 1e7) -> None:
        """Let a client for each of `sizes` ask again and again, as many requests at a time as UNDER_WAY says where they are `named`."""
        service = Service(
            Nothing, executor=self.executor, clock=self.clock, max_batch_size=64, max_batch_cost=BUDGET, max_padding=PRICE / 2,
            padding_cost=PADDING_SHARE,
        )  # fmt: skip
        async with service:
            encoder = Encoder(service, TokenizerThreads(Lengths(), 0), TextShape(1, LONGEST))
            asking = [
                asyncio.ensure_future(self._client(encoder, number, size, named, within))
                for number, size in enumerate(sizes)
                for _ in range(max(1, UNDER_WAY // size) if named else 1)
            ]
            began = self.clock()
            while self.clock() < began + seconds:
                await self._step()
                if self.clock() < began + WARM * seconds:
                    self.answered.clear()
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            while self.executor.pending:
                await self._step()
            encoder.close()

    async def _client(self, encoder: Encoder, number: int, size: int, named: bool, within: float) -> None:
        client = f"client {number}" if named else ""
        while True:
            texts: list[Text] = [f"{number} {next(self._numbers)} {self._length()}" for _ in range(size)]
            sent = self.clock()
            try:
                await encoder.encode(texts, TextQuery("test", client=client, timeout=within))
            except DeadlineExceeded:
                self.late += 1
            else:
                self.requests.append(Request(size, sent, self.clock() - sent))

    def _length(self) -> int:
        return self._chance.randint(SHORTEST, LONGEST)

    async def _step(self) -> None:
        """Let the batch that ends next end."""
        for _ in range(SETTLED):
            await asyncio.sleep(0)
        running = {number for _, number, _, _ in self._ends}
        for worker, batch in self.executor.pending:
            if batch.batch_id not in running:
                heapq.heappush(self._ends, (self.clock() + _seconds(batch), batch.batch_id, worker, batch))
        end, number, worker, batch = heapq.heappop(self._ends)
        self.clock.advance(end - self.clock())
        for tokens in batch.payloads:
            self.answered[int.from_bytes(tokens.ids[:4], "little")] += 1
        self.executor.reply(worker, whole(number, [_VECTOR] * len(batch.payloads)))


_VECTOR = numpy.zeros(1, numpy.float32)


class Nothing(Model):
    """A model of texts that is never run."""

    padded = True

    def predict(self, batch: list[Any]) -> list[Any]:
        """Nobody asks."""
        return batch


class Read(NamedTuple):
    """What a text became."""

    ids: bytes
    second: int = 0
    truncated: bool = False
    foreign: bool = False


class Lengths:
    """A tokenizer of texts that say whose they are and how long: "client number length"."""

    def encode(self, texts: Sequence[Text], rule: TokenRule) -> list[Any]:
        """Read texts."""
        said = [str(text).split() for text in texts]
        return [Read(int(client).to_bytes(4, "little") * int(length)) for client, _, length in said]

    def at_once(self, texts: Sequence[Text], rule: TokenRule) -> list[Any]:
        """Do what `encode` does."""
        return self.encode(texts, rule)

    def split(self, text: Text, rule: TokenRule) -> list[Any]:
        """Nobody asks."""
        return []

    def tokens(self, ids: bytes) -> list[str]:
        """Nobody asks."""
        return []

    def details(self, text: str, *, special: bool = True, prompt: str | None = None) -> list[Any]:
        """Nobody asks."""
        return []

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Nobody asks."""
        return ""


def _seconds(batch: Batch) -> float:
    lengths = [len(tokens.ids) // 4 for tokens in batch.payloads]
    padding = len(lengths) * max(lengths) - sum(lengths)
    return (PRICE + sum(lengths) + PADDING_SHARE * padding) / TOKENS_PER_SECOND


def beside(size: int) -> dict[str, float]:
    """Let 16 clients ask for REFERENCE texts at a time and 16 for `size`, in virtual time."""
    server, sizes = Virtual(), [REFERENCE] * CLIENTS + [size] * CLIENTS
    texts = sum(sizes) * WHOLE + WORTH * CLIENTS
    seconds = texts / 300.0
    asyncio.run(server.run(sizes, seconds, named=False))
    return _summary(server.requests, size, seconds)


def _summary(requests: Sequence[Request], size: int, seconds: float) -> dict[str, float]:
    """Return how long requests took; where none had its end, as long as was waited for it."""
    first, last = min(each.sent for each in requests), max(each.sent for each in requests)
    took: defaultdict[int, list[float]] = defaultdict(list)
    for each in requests:
        if each.sent >= first + WARM * (last - first) or each.size > REFERENCE:
            took[each.size].append(each.took)
    other, mine = took[REFERENCE], took[size] or [seconds]
    return {"p50": median(mine), "max": max(mine), "p50 of 16": median(other), "max of 16": max(other)}


def equals() -> dict[str, float]:
    """Return the texts that clients of each of EQUALS get, in virtual time, as a share of the mean."""
    server = Virtual()
    asyncio.run(server.run(EQUALS, 1_200.0, named=True))
    mean = sum(server.answered.values()) / len(EQUALS)
    return {str(size): server.answered[number] / mean for number, size in enumerate(EQUALS)}


def saturated() -> dict[str, float]:
    """Let 64 clients of mixed sizes saturate it, each with a deadline; return how many requests were too late."""
    server = Virtual()
    sizes = [1, 5, 16, 17, 20, 40, 64, 100] * 8
    asyncio.run(server.run(sizes, 600.0, named=False, within=TIMEOUT))
    took = defaultdict(list)
    for each in server.requests:
        took[each.size].append(each.took)
    return {"too late": server.late, **{f"max of {size}": max(took[size], default=0.0) for size in sorted(set(sizes))}}


def measure_virtual(say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all in virtual time."""
    found: dict[str, Any] = {"beside": {}}
    for size in SIZES:
        found["beside"][str(size)] = one = beside(size)
        say(f"16 clients of 16, 16 of {size}: " + ", ".join(f"{name} {value:.2f} s" for name, value in one.items()))
    found["equals"] = equals()
    say("equals: " + ", ".join(f"{size}: {share:.2f}" for size, share in found["equals"].items()))
    found["saturated"] = saturated()
    say("saturated: " + ", ".join(f"{name} {value:.1f}" for name, value in found["saturated"].items()))
    return found


def measure_live(say: Callable[[str], None], seconds: float, shares_seconds: float) -> dict[str, Any]:
    """Measure the first two on a server."""
    from benchmarks.harness.texts import model_directory

    found: dict[str, Any] = {"beside": {}}
    flags = [str(model_directory()), "--device-map", "cpu", "--timeout", "600"]
    if seconds:
        with text_server(flags) as server:
            for size in LIVE_SIZES:
                requests = _live(server, [REFERENCE] * CLIENTS + [size] * CLIENTS, seconds)
                found["beside"][str(size)] = one = _summary(requests, size, seconds)
                values = ", ".join(f"{name} {value:.2f} s" for name, value in one.items())
                say(f"16 clients of 16, 16 of {size}: {values}")
    with text_server([*flags, "--layers", "-6"], zmq=True) as server:
        # Of six: so that a request of 4,096 takes less than minutes.
        rates = _rates(server, shares_seconds)
    mean = sum(rates.values()) / len(rates)
    found["equals"] = {str(size): rate / mean for size, rate in rates.items()}
    say(
        f"{sum(rates.values()):.0f} sentences/s in all; equals: "
        + ", ".join(f"{size}: {share:.2f}" for size, share in found["equals"].items())
    )
    return found


def _rates(connect: RunningServer, seconds: float) -> dict[int, float]:
    """Return the sentences a second that a client of each of LIVE_EQUALS gets. Each has two requests under way at least, so that it always has
    texts that wait."""
    from benchmarks.harness.texts import sample

    words = [word for text in sample() for word in text.split() if word.isalpha()]
    end = time.monotonic() + seconds

    def client(size: int) -> list[float]:
        chance, ends = random.Random(size), list[float]()
        batches = ([f"{chance.random():.6f} {chance.choice(words)}" for _ in range(size)] for _ in count())
        with connect() as made:
            for _ in made.encode_async(batches, ahead=_ahead(size)):
                ends.append(time.monotonic())
                if ends[-1] > end:
                    break
        return ends

    with ThreadPoolExecutor(len(LIVE_EQUALS)) as pool:
        found = dict(zip(LIVE_EQUALS, pool.map(client, LIVE_EQUALS), strict=True))
    try:
        return steady_rates(found)
    except ValueError as error:
        raise SystemExit(f"--shares-seconds {seconds:g}: {error}") from None


def _ahead(size: int) -> int:
    return max(2, LIVE_UNDER_WAY // size)


def steady_rates(found: dict[int, list[float]]) -> dict[int, float]:
    """Return the sentences a second of each size from when its requests had their answers, all in the same span of time: from the first answers
    of the largest to its last.

    A client's requests take turns, so those that were sent together end together: with two ahead, six answers of 1,024 texts come as three
    pairs, and to count five of them over the two spans between the pairs would be a quarter too much. So what counts is from an answer
    to another that is a whole number of such rounds later. Raises ValueError where a size has no whole round in that span.
    """
    largest = max(found)
    ends = found[largest]
    first, last = ends[_ahead(largest) - 1], ends[-2]
    rates = {}
    for size, ends in found.items():
        counted = [each for each in ends if first <= each <= last]
        steps = (len(counted) - 1) // _ahead(size) * _ahead(size)
        if steps < 1:
            raise ValueError(f"too short for a round of requests of {size} texts here")
        rates[size] = size * steps / (counted[steps] - counted[0])
    return rates


def _live(connect: RunningServer, sizes: Sequence[int], seconds: float) -> list[Request]:
    from benchmarks.harness.texts import sample

    texts, end, found = sample(), time.monotonic() + seconds, list[Request]()

    def client(number: int, size: int) -> None:
        chance = random.Random(number)
        with connect() as made:
            while (sent := time.monotonic()) < end:
                with suppress(WeirError):
                    made.encode([f"{chance.random()} {chance.choice(texts)[:120]}" for _ in range(size)])
                    found.append(Request(size, sent, time.monotonic() - sent))

    with ThreadPoolExecutor(len(sizes)) as pool:
        list(pool.map(client, range(len(sizes)), sizes))
    return found


def show(console: Console, found: dict[str, Any]) -> None:
    """Show what was measured."""
    table = Table("texts in a request", "p50", "max", "p50 of 16 beside it", "max of those", "p50 to p50")
    for size, one in found["beside"].items():
        numbers = [f"{one[name]:.2f} s" for name in ("p50", "max", "p50 of 16", "max of 16")]
        table.add_row(size, *numbers, f"{one['p50'] / one['p50 of 16']:.2f}")
    console.print(table)


def keep(name: str, kind: str, found: dict[str, Any]) -> None:
    """Keep what was measured under that name."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept.setdefault(kind, {}).setdefault(name, {}).update({part: values for part, values in found.items() if values})
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def draw(path: Path = PICTURE) -> None:
    """Draw what is kept: of virtual time, and of a server what each client got."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    everything = json.loads(KEPT.read_text())
    kept, live = everything["virtual"], everything["live"].get("after", {}).get("equals", {})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name, colour in (("before", "#b0483f"), ("after", "#1f6f8b")):
        if name not in kept:
            continue
        found = kept[name]["beside"]
        left.plot(
            [int(size) for size in found],
            [one["p50"] for one in found.values()],
            "o-",
            color=colour,
            label=name,
            markersize=4,
        )
        shares = kept[name]["equals"]
        right.plot(
            [int(size) for size in shares],
            [100 * share for share in shares.values()],
            "o-",
            color=colour,
            label=name,
            markersize=4,
        )
    left.set(xscale="log", yscale="log", xlabel="texts in a request", ylabel="p50 of a request, seconds")
    left.set_title("16 clients of this size and 16 of 16 texts", fontsize=10, loc="left")
    if live:
        sizes, shares = [int(size) for size in live], [100 * share for share in live.values()]
        right.plot(sizes, shares, "D", color="#e0a030", label="after, live: 9 clients", markersize=5)
    right.axhspan(90, 110, color="#e7edf0", zorder=0)
    right.set(xscale="log", ylim=(0, None), xlabel="texts in a request", ylabel="sentences/s, % of the mean")
    right.set_title("13 clients, each with 128 texts or more under way", fontsize=10, loc="left")
    for axis in (left, right):
        axis.set_xticks([1, 4, 16, 64, 256, 1024, 4096], labels=["1", "4", "16", "64", "256", "1,024", "4,096"])
        axis.minorticks_off()
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    """Do what the command line says; return 1 if a wish is not met."""
    parser = argparse.ArgumentParser("benchmarks.sharing", description=__doc__)
    parser.add_argument("--live", action="store_true", help="ask a server rather than in virtual time")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of each size beside 16, with --live; 0: none of these"
    )
    parser.add_argument("--shares-seconds", type=float, default=600.0, help="of the clients of all sizes, with --live")
    parser.add_argument("--keep", metavar="NAME", help="keep what was measured as `before` or `after`, and draw it")
    asked = parser.parse_args()
    console = Console()

    def say(text: str) -> None:
        console.print(f"[dim]{text}[/]")

    found = measure_live(say, asked.seconds, asked.shares_seconds) if asked.live else measure_virtual(say)
    show(console, found)
    if asked.keep:
        keep(asked.keep, "live" if asked.live else "virtual", found)
        draw()
    beside = found["beside"].get("17", {"p50": 0.0, "p50 of 16": 1.0})
    step = beside["p50"] / beside["p50 of 16"]
    shares = found["equals"].values()
    good = step <= 1.2 and min(shares) >= 0.9 * max(shares) and not found.get("saturated", {}).get("too late", 0)
    console.print(f"17 texts to 16: {step:.2f} times (wished: at most 1.2); all wishes met: {'yes' if good else 'no'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
