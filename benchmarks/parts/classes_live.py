"""Interactive texts beside a job, on real servers: what `classes` finds in virtual time, as clients see it.

Each server first shows how much it can do of either kind of work alone, as fast as clients ask. The trace is then scaled to LOAD of what it can do of
single texts. What a job gets beside it is held against the rest: the same share of what the server does for the job alone.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate
from math import inf
from random import Random
from typing import NamedTuple, Self

import numpy as np

from benchmarks.beside import AFTER, Load, Seen
from benchmarks.harness.result import Result, Run
from benchmarks.harness.servers import Server, ask_own, serving, weir_command
from benchmarks.harness.texts import MODEL, infinity, weir

BULK = "X-Weir-Class: bulk\r\n"
SECONDS, QUICK_SECONDS = 25.0, 8.0  # of each load, where it is not the whole trace
ALONE_SECONDS, QUICK_ALONE = 6.0, 4.0  # of what is asked as fast as can be
SHORTER = 16  # MiniLM reads 256 tokens: a text has so many times fewer than the trace
LONGEST = 256
AT_ONCE = 32  # clients that ask for single texts as fast as they can, to see how much that is
LOAD = 0.5
WORDS = [
    "the",
    "a",
    "of",
    "and",
    "in",
    "to",
    "was",
    "is",
    "for",
    "on",
    "as",
    "by",
    "with",
    "he",
    "that",
    "at",
    "from",
    "his",
    "it",
    "an",
    "were",
    "are",
    "which",
    "this",
]

Lengths = Sequence[float]


class Kind(NamedTuple):
    """How texts of given lengths are asked for: the paths of single texts and of those of a job, and a body of some lengths."""

    path: tuple[str, str]
    body: Callable[[Lengths], str]
    in_request: int  # texts of one request of the job
    clients: int  # of the job


def sleeping_body(lengths: Lengths) -> str:
    """Return the body of one item."""
    return str(int(lengths[0]))


def text_body(random: Random, lengths: Lengths) -> str:
    """Return the body of texts with so many tokens each: common words, the first and the last token of the model's."""
    texts = [" ".join(random.choices(WORDS, k=max(1, int(length) - 2))) for length in lengths]
    return json.dumps({"input": texts if len(texts) > 1 else texts[0], "model": MODEL, "encoding_format": "base64"})


def scaled(lengths: Lengths) -> list[float]:
    """Return the lengths of texts for MiniLM."""
    return [min(LONGEST, max(3, length // SHORTER)) for length in lengths]


class Job(NamedTuple):
    """A job: the lengths of the texts of each request, and their bodies."""

    requests: Sequence[Lengths]
    bodies: Sequence[str]

    @classmethod
    def of(cls, kind: Kind, lengths: Lengths) -> Self:
        """Return the job of texts of these lengths."""
        step = kind.in_request
        requests = [lengths[start : start + step] for start in range(0, len(lengths), step)]
        return cls(requests, [kind.body(each) for each in requests])

    def done(self, seen: Seen, until: float) -> tuple[float, int]:
        """Return how many tokens, and how many texts, were computed until then."""
        parts = [self.requests[number] for number, at in seen.done if at <= until]
        return sum(map(sum, parts)), sum(map(len, parts))


class Texts(NamedTuple):
    """The trace, and the jobs by name, in tokens of one kind of server."""

    times: Sequence[float]
    lengths: Lengths
    jobs: Mapping[str, Lengths]

    def scaled(self) -> Self:
        """Return them for MiniLM."""
        return self._replace(
            lengths=scaled(self.lengths), jobs={name: scaled(lengths) for name, lengths in self.jobs.items()}
        )


class Found(NamedTuple):
    """What one way made of both loads: seconds; and the share of the idle capacity that the job got, 0 without it."""

    p50: float
    p99: float
    used: float = 0.0
    texts: float = 0.0  # of the job, per second
    failed: int = 0
    late: float = 0.0  # p99 of how late requests were sent: with more than a few milliseconds the machine is too busy


def put(server: Server, load: Load) -> Seen:
    """Put a load on a server, from a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(load._replace(port=server.port)._asdict(), file)
        file.flush()
        return Seen(**ask_own("beside", file.name, timeout=2 * AFTER + load.seconds))


def found(seen: Seen, used: float = 0.0, texts: float = 0.0) -> Found:
    """Return the figures of a run; a request without an answer counts as the longest of all."""
    responses = [each if each >= 0 else np.inf for each in seen.responses]
    p50, p99 = np.quantile(responses, (0.5, 0.99), method="inverted_cdf")
    failed = sum(each < 0 for each in seen.responses) + seen.failed
    return Found(float(p50), float(p99), used, texts, failed, float(np.quantile(seen.late, 0.99)))


def beginning(kind: Kind, times: Sequence[float], lengths: Lengths, rate: float, seconds: float) -> Load:
    """Return the load of the beginning of a trace, or of all of it: texts that are LOAD of `rate` tokens per second in at most so many seconds."""
    seconds = min(seconds, sum(lengths) / (LOAD * rate))
    count = sum(total <= LOAD * rate * seconds for total in accumulate(lengths))
    until = times[min(count, len(times) - 1)]
    at = [seconds * each / until for each in times[:count]]
    singles = [(when, kind.body([length])) for when, length in zip(at, lengths[:count], strict=True)]
    return Load(0, kind.path, singles, seconds=seconds)


class Comparison:
    """One server under the loads of `texts`. `seconds` is how long both are there at most, `alone` how long either is asked for as fast as can be."""

    def __init__(self, server: Server, kind: Kind, texts: Texts, seconds: float, alone: float) -> None:
        self._server = server
        self._kind = kind
        self._texts = texts
        self._alone = alone
        self._jobs: dict[str, tuple[Job, float]] = {}
        singles = Job.of(kind._replace(in_request=1), texts.lengths[: 20 * AT_ONCE])
        self._load = beginning(kind, texts.times, texts.lengths, self._rate(singles, AT_ONCE), seconds)

    def _rate(self, job: Job, clients: int) -> float:
        """Return how many tokens per second of `job` the server computes for so many clients, while there is nothing else."""
        begins, ends = self._alone / 3, self._alone * 4 / 3  # what is slow the first time does not count
        seen = put(self._server, Load(0, self._kind.path, (), job.bodies, clients, "", ends))
        tokens = job.done(seen, ends)[0] - job.done(seen, begins)[0]
        if not tokens:
            raise RuntimeError(f"{self._server.name} did nothing of a job in {self._alone:g} s")
        return tokens / self._alone

    def alone(self) -> Found:
        """Return what the interactive texts get while there is no job."""
        return found(put(self._server, self._load))

    def beside(self, name: str, headers: str) -> Found:
        """Return what they get beside the job of this name, whose requests have these headers."""
        kind, seconds = self._kind, self._load.seconds
        if name not in self._jobs:
            job = Job.of(kind, self._texts.jobs[name])
            self._jobs[name] = job, self._rate(job, kind.clients)
        job, rate = self._jobs[name]
        seen = put(self._server, self._load._replace(job=job.bodies, clients=kind.clients, headers=headers))
        tokens, texts = job.done(seen, seconds)
        return found(seen, tokens / seconds / ((1 - LOAD) * rate), texts / seconds)


Serve = Callable[[], AbstractContextManager[Server]]


class Contender(NamedTuple):
    """A server, and the ways in which it does the jobs: the way, the headers of its requests, and whether it does all jobs or the first. `where` is SLEEPS or COMPUTES."""

    where: str
    serve: Serve
    kind: Kind
    ways: Sequence[tuple[str, str, bool]]
    seconds: float = SECONDS  # of each load


@contextmanager
def sleeping(name: str, *flags: str) -> Iterator[Server]:
    """Serve a model that sleeps."""
    command = weir_command(f"benchmarks.models:{name}", "--name", "texts", *flags)
    with serving(name, command, path="/infer/texts", body=b"10", expected=None) as server:
        yield server


def text_kind(path: str) -> Kind:
    """Return how texts are asked for at `path`."""
    return Kind((path, path), partial(text_body, Random(2)), 4, 32)


SLEEPS, COMPUTES = "live, a model that sleeps", "live, MiniLM"
WEIR = "Weir"
SLEEPING = Kind(("/infer/texts", "/infer/texts"), sleeping_body, 1, 128)
CONTENDERS = (
    Contender(SLEEPS, partial(sleeping, "Sleeper", "--bulk-delay", "0.01"), SLEEPING, [(WEIR, BULK, True)], inf),
    Contender(
        SLEEPS, partial(sleeping, "SleeperInOrder", "--small-request-size", "0"), SLEEPING, [("FIFO", "", False)], inf
    ),
    Contender(COMPUTES, weir, text_kind("/v1/embeddings"), [(WEIR, BULK, True), ("Weir, no classes", "", False)]),
    Contender(COMPUTES, infinity, text_kind("/embeddings"), [("infinity", "", False)]),
)
JOBS = 2
STEPS = sum(1 + sum(JOBS if whole else 1 for _, _, whole in each.ways) for each in CONTENDERS)


def _beside(p99: float, alone: float) -> tuple[str, str]:
    """Return a p99 in seconds as a text, and how much it is above the one alone. It is infinite if more than one in a hundred had no answer."""
    if not np.isfinite(p99):
        return "over 1 % unanswered", "–"
    return f"{1000 * p99:.0f} ms", f"{100 * (p99 / alone - 1):+.1f} %"


def measure_live(
    run: Run, result: Result, texts: Texts, near: Callable[[float, float], bool], least: float,
    contenders: Sequence[Contender] = CONTENDERS,
) -> None:  # fmt: skip
    """Add the rows, the values and the goals of real servers. `near` tells whether a p99 is near enough to that alone, `least` is the share to be used."""
    for each in contenders:
        seconds, alone = (QUICK_SECONDS, QUICK_ALONE) if run.quick else (each.seconds, ALONE_SECONDS)
        with each.serve() as server:
            compared = Comparison(server, each.kind, texts if each.where == SLEEPS else texts.scaled(), seconds, alone)
            before = compared.alone()
            run.step(f"{server.name}, {each.where}, alone: {_shown(before)}")
            for way, headers, whole in each.ways:
                for name in list(texts.jobs)[: JOBS if whole else 1]:
                    seen = compared.beside(name, headers)
                    run.step(f"{way}, {each.where}, {name}: {_shown(seen)}")
                    _add(result, name, f"{way}, {each.where}", seen, before)
                    if way == WEIR:
                        more = f"{100 * (seen.p99 / before.p99 - 1):+.1f} %"
                        goal = f"{each.where}, {name}"
                        is_near = near(seen.p99, before.p99)
                        result.goal(f"{goal}: p99 at most 5 % or 2 ms above alone", more, is_near)
                        result.at_least(f"{goal}: 80 % of the idle capacity", seen.used, least)


def _shown(seen: Found) -> str:
    return (
        f"p50 {1000 * seen.p50:.0f} ms, p99 {1000 * seen.p99:.0f} ms, {100 * seen.used:.0f} % of the idle capacity, "
        f"{seen.failed} failed, sent up to {1000 * seen.late:.1f} ms late"
    )


def _add(result: Result, job: str, way: str, seen: Found, before: Found) -> None:
    result.rows.append([
        job, way, f"{1000 * seen.p50:.0f} ms", *_beside(seen.p99, before.p99),
        f"{100 * seen.used:.0f} %", f"{seen.texts:.0f} texts/s",
    ])  # fmt: skip
    result.values |= {
        f"{way} {job} p99": seen.p99,
        f"{way} {job} alone": before.p99,
        f"{way} {job} used": seen.used,
    }
