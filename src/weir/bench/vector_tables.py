"""The tables that bert-as-service has been measured by: length, size of a request, clients, size of a batch, layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import NamedTuple

from weir.bench.vectors import WORDS, Clients, Connect, Patience, measure, measure_steady

UNDER_WAY = 256  # texts, in small requests or in large ones
CALLERS = 8  # clients of small requests, of one text each
LARGE_CLIENTS = 2  # so that one's texts are computed while the other's answer is on its way
ROUNDS = 3
WISHED = 0.9

# A server with these flags, for the length of a block.
Serve = Callable[[Sequence[str]], AbstractContextManager[Connect]]


class Table(NamedTuple):
    """A measured table: whole numbers, and rates, which are no whole numbers. `remark` stands below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]
    remark: str = ""

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.columns, ["---:"] * len(self.columns), *(map(_shown, row) for row in self.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.remark}\n" if self.remark else "")


class TablesPlan(NamedTuple):
    """What is to be measured. An empty list leaves a table out. `length` is that of texts, in tokens, where it is not what changes, `batch`
    is how many a client asks for at once."""

    lengths: Sequence[int] = (20, 40, 80, 160, 320)
    batches: Sequence[int] = (1, 4, 8, 16, 64, 256, 512, 1024, 2048, 4096)
    clients: Sequence[int] = (1, 2, 4, 8, 16, 32)
    batch_sizes: Sequence[int] = (32, 64, 128, 256, 512)
    layers: Sequence[int] = ()
    length: int = 40
    batch: int = 256
    patience: Patience = Patience(8, 5.0)
    small_and_large: bool = True
    vocabulary: Sequence[str] = WORDS

    @property
    def steps(self) -> int:
        """How many measurements that is."""
        lists = (self.lengths, self.batches, self.clients, self.batch_sizes, self.layers)
        return sum(map(len, lists)) + 2 * ROUNDS * self.small_and_large


class Tables:
    """Measures what `plan` says with servers of `serve`; `progress` hears of each measurement."""

    def __init__(self, plan: TablesPlan, serve: Serve, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._serve = serve
        self._progress = progress

    def measure(self) -> Iterator[Table]:
        """Yield each table when it is done. Servers are started anew where what changes is a setting of theirs."""
        plan = self._plan
        if plan.lengths:
            yield self._by_setting("Length of texts", "tokens", "--max-length", plan.lengths)
        if plan.batch_sizes:
            yield self._by_setting(
                "Texts in a batch of the server", "max batch size", "--max-batch-size", plan.batch_sizes
            )
        if plan.layers:
            yield self._by_setting("Pooled layer", "layer", "--layers", plan.layers)
        if plan.batches or plan.clients or plan.small_and_large:
            with self._serve(["--max-length", str(plan.length)]) as connect:
                yield from self._of_one_server(connect)

    def _of_one_server(self, connect: Connect) -> Iterator[Table]:
        plan = self._plan
        if plan.batches:
            rates = {batch: sum(self._rates(connect, Clients(1, batch, plan.length))) for batch in plan.batches}
            least = min(rates)
            said = (
                "The client waits for each answer before it asks again, so that nothing else is under way. "
                f"By {least} at a time it gets {rates[least] / max(rates.values()):.2f} of what it gets at best."
            )
            yield Table("Texts in a request of one client", ["texts", "texts/s"], list(rates.items()), said)
        if plan.clients:
            yield self._by_clients(connect)
        if plan.small_and_large:
            yield self._small_and_large(connect)

    def _by_clients(self, connect: Connect) -> Table:
        """Counted while all of them ask: who is answered first, and counted then, would seem to be faster than all together are."""
        plan, rows = self._plan, []
        for count in plan.clients:
            rate = self._steady(connect, Clients(count, plan.batch, plan.length))
            rows.append((count, rate / count, rate))
        said = f"{plan.batch} texts a request; each client waits for its answer before it asks again."
        return Table("Clients", ["clients", "texts/s each", "texts/s in all"], rows, said)

    def _by_setting(self, title: str, column: str, flag: str, values: Sequence[int]) -> Table:
        plan, rows = self._plan, []
        for value in values:
            length = value if flag == "--max-length" else plan.length
            told = ["--max-length", str(length)]
            if flag == "--max-batch-size":  # full of texts, and computed as one
                told += [flag, str(value), "--max-batch-cost", str(value * length), "--run-tokens", str(value * length)]
            elif flag != "--max-length":
                told += [flag, str(value)]
            with self._serve(told) as connect:
                rates = self._rates(connect, Clients(1, plan.batch, length), f"{flag} {value}: ")
            rows.append((value, sum(rates)))
        return Table(title, [column, "texts/s"], rows, f"One client, {plan.batch} texts a request.")

    def _small_and_large(self, connect: Connect) -> Table:
        """The same texts, as many of them under way: one a request, or in two large requests."""
        plan = self._plan
        kinds = {
            "small": Clients(CALLERS, 1, plan.length, UNDER_WAY // CALLERS),
            "large": Clients(LARGE_CLIENTS, UNDER_WAY // LARGE_CLIENTS, plan.length),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(ROUNDS):
            for kind in sorted(kinds, reverse=bool(turn % 2)):
                rates[kind].append(self._steady(connect, kinds[kind], f"{kind} requests: "))
        share = median(small / large for small, large in zip(rates["small"], rates["large"], strict=True))
        said = f"Small requests reach {share:.2f} of the throughput of large ones (wished: {WISHED} or more)."
        rows = [
            (clients.number, clients.ahead, clients.batch, clients.under_way, median(rates[kind]))
            for kind, clients in kinds.items()
        ]
        columns = ["clients", "requests each has under way", "texts in a request", "texts under way", "texts/s"]
        return Table("Small requests and large ones", columns, rows, said)

    def _steady(self, connect: Connect, clients: Clients, what: str = "") -> float:
        rate = sum(measure_steady(connect, clients, self._plan.patience.seconds, self._plan.vocabulary))
        self._progress(f"{what}{_who(clients)}, {clients.under_way} texts under way: {_shown(rate)} texts/s")
        return rate

    def _rates(self, connect: Connect, clients: Clients, what: str = "") -> list[float]:
        rates = measure(connect, clients, self._plan.patience, self._plan.vocabulary)
        self._progress(f"{what}{_who(clients)}: {_shown(sum(rates))} texts/s")
        return rates


def _who(clients: Clients) -> str:
    return f"{clients.number} client{'s' * (clients.number > 1)}, {clients.batch:,} text{'s' * (clients.batch > 1)} a request"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"
