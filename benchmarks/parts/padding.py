"""Batches by length beside batches by arrival: how much of what is computed is padding. Virtual time, the real batcher."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.harness.result import Part, Result, Run, count
from benchmarks.harness.texts import paragraphs
from weir.batching import BatchingSettings
from weir.batching.batcher import Batcher
from weir.batching.request_state import RequestBase
from weir.errors import SettingsError
from weir.messages import Form, Wakeup
from weir.policy.decision import Greedy
from weir.text_models.texts import TokenRule
from weir.text_server.calibration import PADDING_SHARE

WAITING = (16, 64, 256, 512, 10_000)
ROWS, TOKENS = 64, 2048
PRICE, CPU_PRICE = 40.0, 25.0  # of a batch beyond its tokens, as tokens
CAPS = (0.125, 0.25, 0.375, PADDING_SHARE, 0.75, 1.0, 1.5)  # of the price may be padding
FEW = 16
SHARE = 0.2  # of a token's time that padding takes on a CPU, where only attention computes it
MOST_TOKENS = 256  # the model's length
TEXTS = 20_000
ALL = "by arrival", "by length"
CPU = " on a CPU"


class Seen(NamedTuple):
    """What came of one run, in tokens: how many there were, what was computed for them, and what that and the batches took."""

    tokens: float
    work: float
    took: float
    texts: int

    @property
    def waste(self) -> float:
        """The share of what was computed that was padding."""
        return 1.0 - self.tokens / self.work


def measure(run: Run) -> Result:
    """Keep so many texts waiting, and cut batches of them in both ways."""
    lengths = token_counts(paragraphs())
    lengths.sort()
    kinds = {"": (PRICE, 1.0), CPU: (CPU_PRICE, SHARE)}
    ways = {f"{way}{where}": (way, *kind) for where, kind in kinds.items() for way in ALL}
    result = Result(["waiting", *(f"padding {way}" for way in ways), *(f"tokens a text takes {way}" for way in ways)])
    for waiting in WAITING:
        seen = {name: simulate(lengths, waiting, *how) for name, how in ways.items()}
        result.rows.append([
            count(waiting), *(f"{100 * each.waste:.1f} %" for each in seen.values()),
            *(f"{each.took / each.texts:.1f}" for each in seen.values()),
        ])  # fmt: skip
        result.values |= {f"{way} {waiting}": each.waste for way, each in seen.items()}
        run.step(f"{waiting:,} waiting: " + ", ".join(f"{way} {100 * each.waste:.1f} %" for way, each in seen.items()))
    waste = result.values[f"{ALL[1]} 256"]
    result.goal("padding below 10 % with 256 texts waiting", f"{100 * waste:.1f} %", waste < 0.1)
    for way in (ALL[1], f"{ALL[1]}{CPU}"):
        few = result.values[f"{way} {FEW}"]
        result.goal(f"{way} also with {FEW}", f"{100 * few:.1f} %", few < 0.1)
        took = {cap: simulate(lengths, FEW, *ways[way], cap).took for cap in CAPS}
        more = took[PADDING_SHARE] / min(took.values())
        result.goal(f"{way} with {FEW} no other bound on padding 1 % better", f"{100 * (more - 1):.1f} %", more < 1.01)
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    result.notes.append(
        f"{len(lengths):,} paragraphs of the standard library's docstrings, {lengths[0]} to {longest} tokens (median {middle}, cut at {MOST_TOKENS}), in virtual time with the real "
        f"batcher. Batches have up to {ROWS} texts and, by length, up to {TOKENS:,} tokens, at most {PADDING_SHARE * PRICE:g} of them padding. On a CPU, padding is computed only in "
        f"attention and takes {SHARE:g} of a token's time."
    )
    return result


def token_counts(texts: Sequence[str]) -> list[int]:
    """Return how many tokens each text has for the small model."""
    from weir.text_models.checkpoint.reading import read_checkpoint
    from weir.text_server.server_settings import INSTALL, installed_model

    folder = installed_model()
    if folder is None:
        raise SettingsError(f"the model whose tokens are counted is not installed: {INSTALL}")
    found = read_checkpoint(folder).tokenizer().encode(texts, TokenRule(MOST_TOKENS))
    return [len(each.ids) // 4 for each in found if not isinstance(each, Exception)]


def simulate(
    lengths: Sequence[int], waiting: int, way: str, price: float, share: float, cap: float = PADDING_SHARE
) -> Seen:
    """Run texts through one worker, `waiting` in the queue when a batch is cut: a batch takes `price` tokens, padding `share` of as many, and
    `cap` of the price may be padding."""
    random, padded = Random(1), way == ALL[1]
    settings = BatchingSettings(
        max_batch_size=ROWS, max_batch_cost=float(TOKENS) if padded else None, padded=padded, max_padding=cap * price,
        padding_cost=share, max_queue_size=2 * max(waiting, ROWS),
    )  # fmt: skip
    batcher = Batcher(settings, Greedy())
    now, tokens, work, batches, done, missing = 0.0, 0.0, 0.0, 0, 0, waiting
    while done < TEXTS:
        for _ in range(missing):
            now += 1e-6
            form = Form(1e9, cost=float(random.choice(lengths)))
            batcher.submit(RequestBase(form, None, now), now)  # type: ignore[arg-type]  # nobody hears of its end
        if not batches:
            batcher.worker_ready(0, 1, now)
        (cut,) = batcher.poll(now, Wakeup.WORKER)
        costs = [request.form.cost for request in cut.requests]
        tokens, work = tokens + sum(costs), work + sum(costs) + share * (len(costs) * max(costs) - sum(costs))
        batches, done, missing = batches + 1, done + cut.rows, cut.rows
        now += 1e-3
        batcher.finished(cut.batch_id, now)
        for request in cut.requests:
            request.settled = True
    return Seen(tokens, work, work + price * batches, done)


PART = Part(
    "padding",
    "Padding",
    "Padding as a share of all computed tokens, with batches by arrival and by length.",
    lambda rounds: len(WAITING),
    measure,
)
