"""Faults of the kinds that Weir has had, planted one at a time: `python -m tests.simulated.mutants [--seconds 60] [--write] [NAME ...]`.

Each replaces one place of the source as it is imported, in a process of its own. The simulation must find every one; a table says how soon. What has been
found is kept in build/ until the source changes, so that a run that was stopped goes on where it was. `--write` puts the table into docs/explanation/testing.md.
"""

import argparse
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from tests.simulated.mutants_of_fronts import OF_CHAINS, OF_FRONTS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "explanation" / "testing.md"
BEGIN, END = "<!-- mutants: written by `python -m tests.simulated.mutants --write` -->", "<!-- end of mutants -->"
_STATE = ROOT / "build" / "mutants.json"
_SEEN = re.compile(r"^seed (\d+): (.*)", re.MULTILINE)


class Mutant(NamedTuple):
    """A fault: in which module which text is replaced by which."""

    module: str
    before: str
    after: str


MUTANTS = {
    "status-missing": Mutant("weir.wire.status", '    errors.Conflict: Codes(409, "ALREADY_EXISTS"),\n', ""),
    "status-of-one-protocol": Mutant("weir.wire.status", "_KSERVE = {422: 400, 409: 400}", "_KSERVE = {422: 400}"),
    "error-as-value": Mutant(
        "weir.messages", "_with_errors(outputs, kinds) if has_failed(outputs) else kinds", "kinds"
    ),
    "charge-kept": Mutant("weir.frontends.http.fast.connection", "            claim.close()\n", ""),
    "charge-of-what-waits-kept": Mutant(
        "weir.frontends.http.fast.connection", "        self.shared.account.give(self._counted)\n", ""
    ),
    "charge-of-unread-kept": Mutant(
        "weir.frontends.http.fast.connection", "        self.shared.account.give(self._unread)\n", ""
    ),
    "wake-up-lost-of-a-group": Mutant(
        "weir.batching.batcher", "        if group.asleep:\n            queue.scheduler.wake(group)\n", ""
    ),
    "wake-up-lost-of-a-turn": Mutant("weir.serving.driver", "        self._polling = self._looked_again = False\n", "        self._looked_again = False\n"),
    "settled-answered-again": Mutant(
        "weir.batching.request_state", "        if request.settled:\n            unwanted", "        if False:\n            unwanted"
    ),
    "timer-not-armed-again": Mutant(
        "weir.serving.driver", "        self._poll(Wakeup.TIMER, now)\n        self._arm()\n", "        self._poll(Wakeup.TIMER, now)\n"
    ),
    "answer-after-the-deadline": Mutant(
        "weir.serving.driver", "if self.batcher.is_late(events.batch_id, now):", "if False:"
    ),
    "running-never-expires": Mutant("weir.batching.batcher", "self._settle_late(self._running.passed(now), now)", "pass"),
    "left-stays-in-queue": Mutant("weir.batching.batcher", "if request.taken < request.rows:", "if False:"),
    "next-request-forgotten": Mutant(
        "weir.frontends.http.fast.connection",
        "        self._since = self.shared.tick\n        if self._pending:\n            self._advance()",
        "        self._since = self.shared.tick",
    ),
    "half-of-a-dead-batch-lost": Mutant(
        "weir.batching.retry", "for half in (entries[:middle], entries[middle:]):", "for half in (entries[:middle],):"
    ),
    "drain-does-not-wait": Mutant(
        "weir.serving.driver", "not self._has_outside and self.batcher.is_empty:", "not self._has_outside:"
    ),
    "pieces-out-of-order": Mutant("weir.batching.request_state", "for start in sorted(self.pieces)]", "for start in self.pieces]"),
    "former-generation-forgotten": Mutant("weir.serving.service", "                generation = former\n", "                pass\n"),
    "end-not-noted": Mutant(
        "weir.serving.delivery",
        "        _discard_gathered(request)\n        self._had_their_end([request], error, now)\n",
        "        _discard_gathered(request)\n",
    ),
    "timeout-of-the-caller-ignored": Mutant("weir.protocols.native", "    options.timeout = seconds\n", ""),
    "form-of-another-protocol": Mutant(
        "weir.frontends.http.fast.connection", "if self.phase in (BODY, LARGE, SKIP, BUSY):", "if self.phase in (BODY, LARGE, SKIP):"
    ),
    "form-of-the-next-request": Mutant(
        "weir.frontends.http.fast.handover", 'self.url if first is None else first.scope["raw_path"]', "self.url"
    ),
    "refused-for-the-next-request": Mutant(
        "weir.frontends.http.fast.handover", "        if self.busy and not self._open[0].more_body:\n", "        if refusal is None and self.busy and not self._open[0].more_body:\n"
    ),
    "late-once-more": Mutant(
        "weir.batching.batcher", "        queue.sweep()\n        if self._bulk_seen", "        if self._bulk_seen"
    ),
    "content-taken-for-framing": Mutant(
        "weir.frontends.http.fast.handover",
        "self._held.rfind(END_OF_HEAD, 0, _PIECE_OF_CHUNKS) if self._in_body else -1",
        "self._held.find(END_OF_HEAD, _PIECE_OF_CHUNKS) if self._in_body else -1",
    ),
    "left-cancelled-nowhere": Mutant(
        "weir.frontends.http.fast.connection", "        if request is not None:\n            request.leave()\n", ""
    ),
    "left-cancelled-for-the-last-only": Mutant("weir.frontends.http.fast.handover", "        for cycle in self._open:\n", "        for cycle in ():\n"),
    "reading-never-resumed": Mutant(
        "weir.frontends.http.fast.connection", "            else:\n                self.transport.resume_reading()", "            else:\n                pass"
    ),
    "expired-not-settled": Mutant(
        "weir.batching.queue", "                settle(request)\n                late.append(request)", "                late.append(request)"
    ),
    "earlier-deadline-not-armed": Mutant(
        "weir.workers.timer", "if when is None or (self._armed is not None and self._armed <= when):", "if when is None or self._armed is not None:"
    ),
    "wrong-length-accepted": Mutant("weir.workers.run.steps", "if type(returned) is list and len(returned) == count:", "if type(returned) is list:"),
    "failure-of-one-for-all": Mutant("weir.workers.run.steps", "if len(values) == 1 or not self._halves:", "if True:"),
    "place-never-free": Mutant(
        "weir.serving.driver", "            self.batcher.finished(events.batch_id, now)\n", "            self.batcher._take_back(events.batch_id)\n"
    ),
    "name-of-the-error-missing": Mutant(
        "weir.protocols.kserve", "    if isinstance(error, WeirError):\n        headers.append((ERROR_NAME", "    if False:\n        headers.append((ERROR_NAME"
    ),
    "body-never-too-slow": Mutant("weir.protocols.account", "        return self._spent > 1.0\n", "        return False\n"),
    "room-without-end": Mutant(
        "weir.batching.queue", "        if self.arrivals >= self.ceiling or (self.cost + cost", "        if True:\n            return True\n        if self.arrivals >= self.ceiling or (self.cost + cost"
    ),
    "expired-computed": Mutant("weir.serving.driver", "in self.batcher.where(late):", "in ():"),
    "rest-of-a-failed-request-computed": Mutant(
        "weir.serving.driver", "        if dispatch.slices is not None and events.kinds is not None:\n", "        if False:\n"
    ),
    "never-ready-again": Mutant("weir.serving.driver", "self.failed = self.not_ready_reason = \"\"", "self.failed = \"\""),
    "ready-without-workers": Mutant(
        "weir.serving.driver", "self.failed = self.not_ready_reason = reason", "self.failed = reason"
    ),
    "counted-twice": Mutant("weir.telemetry.recorder", "            self.ended[first, kind] += count\n", "            self.ended[first, kind] += count + (error is not None)\n"),
    "cancelled-message-without-end": Mutant(
        "weir.frontends.websocket", "            current.cancel()\n            current.fail(_given_up())\n", "            current.cancel()\n"
    ),
    "message-of-another-id": Mutant(
        "weir.frontends.websocket", "response = response_of(service, request, [queued.kind], [queued.output], queued.waited)",
        "response = response_of(service, request, [queued.kind], [queued.output], queued.waited); response.id = \"1\"",
    ),
    "front-does-not-withdraw": Mutant("weir.fronts.remote", "            self.link.put(CallerLeft(request.number))\n", ""),
    "requests-of-a-dead-front-stay": Mutant(
        "weir.fronts.dispatcher", "        for request in requests.values():\n            request.handle.cancel(request)\n", ""
    ),
    "refusal-kept-from-a-front": Mutant(
        "weir.fronts.dispatcher", "            handle.notify(form.frontend, error)\n            self.fail(request.number, error)\n", "            handle.notify(form.frontend, error)\n"
    ),
    "withdrawn-in-the-table-only": Mutant(
        "weir.fronts.dispatcher", "        if request is not None:\n            request.handle.cancel(request)\n\n    def _count", "\n    def _count"
    ),
    "answers-of-a-turn-kept": Mutant("weir.fronts.dispatcher", "        self.answers = PlainOutputs([], [])\n        self._loop.call_soon(self.turn_ends)\n", "        self.answers = PlainOutputs([], [])\n"),
    "handed-back-nowhere": Mutant("weir.fronts.dispatcher", "            self._link.put(MustHandOver(number))\n", "            pass\n"),
    "removed-worker-served": Mutant("weir.serving.driver", "            self.worker_lost(worker, \"\")\n", ""),
    "crash-tried-for-ever": Mutant("weir.batching.retry", "if dispatch.batch_id in self._last_tries:", "if False:"),
    "expired-runs-again": Mutant(
        "weir.batching.batcher", "            self._settle_late([*self._suspects.passed(now), *bulk.suspects.passed(now)], now)\n", "            pass\n"
    ),
    "reload-does-not-wait": Mutant("weir.serving.service", "        await self.generation.stop(drain_timeout)\n        if self", "        await self.generation.stop(0.0)\n        if self"),
    "former-generation-kept": Mutant("weir.serving.service", "            self._all.remove(self.generation)", "            pass"),
    "slow-stream-loses-parts": Mutant("weir.serving.driver", "        for request, error in refused:\n            self._end(request, error, now)\n        self._note", "        self._note"),
    "part-after-the-end": Mutant("weir.batching.collate", "        if request.settled:\n            if kind == EventKind.PART:", "        if False:\n            if kind == EventKind.PART:"),
    "bulk-never-cut": Mutant("weir.batching.batcher", "                self._cut_bulk(cut, now, wakeup)\n", "                pass\n"),
    "bulk-in-the-wrong-queue": Mutant("weir.batching.batcher", "return self._bulk if is_bulk(request) else self._interactive", "return self._interactive"),
    "bulk-without-end": Mutant("weir.batching.batcher", "        if not queue.room(request.rows, request.cost):\n            raise Overloaded(f\"bulk", "        if False:\n            raise Overloaded(f\"bulk"),
    "keys-mixed": Mutant("weir.batching.queue", "        group = self.groups.get(request.key)\n        if group is None:\n            group = self.groups[request.key] = self._new_group(request.key)\n        group.add", "        group = self.groups.get(None)\n        if group is None:\n            group = self.groups[None] = self._new_group(None)\n        group.add"),
    "unload-does-not-wait": Mutant("weir.catalog.manager", "self._stopped(ending.values())", "asyncio.gather(*[each.stop(0.0) for each in ending.values()], return_exceptions=True)"),
    "unloaded-still-there": Mutant("weir.catalog.manager", "            self.registry.remove(name)\n            self._endpoints", "            self._endpoints"),
    "replaced-never-stopped": Mutant("weir.catalog.manager", "        await self._retire(self._put(name, services, reading.default, reading.versions))", "        self._put(name, services, reading.default, reading.versions)"),
    "drain-cuts-off-a-change": Mutant("weir.catalog.manager", "        return await asyncio.shield(task)\n\n\nasync def _discard", "        return await task\n\n\nasync def _discard"),
    "index-lies": Mutant("weir.catalog.manager", "        if service.ready:\n            return READY", "        if True:\n            return READY"),
    "busy-model-evicted": Mutant("weir.policy.residency", "(not is_idle(name), self.index(name, now), self._last(name))", "(self.index(name, now), self._last(name))"),
    "failed-load-keeps-its-memory": Mutant("weir.policy.residency", "        self._move(name, Presence.FAILED, now, reason)\n        return pause", "        return pause"),
    "load-begins-twice": Mutant("weir.policy.residency", "model.presence not in (*IN_MEMORY, Presence.WAITING)", "model.presence not in (Presence.LOADED, Presence.WAITING)"),
    "memory-taken-before-it-is-free": Mutant("weir.policy.residency", "        if self.used.plus(needed).fits(self.limits):\n            return NextStep(name, [])", "        if self._staying.plus(needed).fits(self.limits):\n            return NextStep(name, [])"),
}  # fmt: skip

MUTANTS |= {name: Mutant(*each) for name, each in (OF_FRONTS | OF_CHAINS).items()}

# Which kinds of faults Weir has had, and the mutants of each.
KINDS = {
    "a status or name missing from a table": ("status-missing", "status-of-one-protocol", "name-of-the-error-missing"),
    "an error sent as a value, or another request's error": ("error-as-value", "wrong-length-accepted", "failure-of-one-for-all"),
    "a forgotten charge": ("charge-kept", "charge-of-what-waits-kept", "charge-of-unread-kept"),
    "a lost wake-up": (
        "wake-up-lost-of-a-group", "wake-up-lost-of-a-turn", "timer-not-armed-again", "earlier-deadline-not-armed", "next-request-forgotten",
        "reading-never-resumed", "answers-of-a-turn-kept", "bulk-never-cut",
    ),
    "a request that ends twice, or never": (
        "settled-answered-again", "expired-not-settled", "end-not-noted", "half-of-a-dead-batch-lost", "cancelled-message-without-end",
        "refusal-kept-from-a-front", "handed-back-nowhere", "crash-tried-for-ever", "late-once-more",
    ),
    "a missed deadline": (
        "answer-after-the-deadline", "running-never-expires", "timeout-of-the-caller-ignored", "body-never-too-slow", "expired-runs-again",
    ),
    "a broken bound": ("room-without-end", "left-stays-in-queue", "place-never-free", "bulk-without-end", "bulk-in-the-wrong-queue", "former-generation-kept"),
    "a response in the wrong order or form": ("pieces-out-of-order", "form-of-another-protocol", "form-of-the-next-request", "refused-for-the-next-request", "content-taken-for-framing", "message-of-another-id", "keys-mixed", "slow-stream-loses-parts", "part-after-the-end"),
    "work that nobody waits for": (
        "left-cancelled-nowhere", "left-cancelled-for-the-last-only", "expired-computed", "rest-of-a-failed-request-computed",
        "front-does-not-withdraw", "requests-of-a-dead-front-stay", "withdrawn-in-the-table-only",
    ),
    "a drain or reload that cuts requests off": ("drain-does-not-wait", "former-generation-forgotten", "reload-does-not-wait", "removed-worker-served"),
    "a fault between fronts": tuple(OF_FRONTS),
    "a load, unload or eviction that goes wrong": (
        "unload-does-not-wait", "unloaded-still-there", "replaced-never-stopped", "drain-cuts-off-a-change", "index-lies", "busy-model-evicted",
        "failed-load-keeps-its-memory", "load-begins-twice", "memory-taken-before-it-is-free",
    ),
    "versions, chains, and added workers": tuple(OF_CHAINS),
    "readiness or metrics that lag behind": ("never-ready-again", "ready-without-workers", "counted-twice"),
}  # fmt: skip


def patched(name: str) -> str:
    """Return the source of the module of a mutant, with the fault in it. Raises ValueError unless its text is there exactly once."""
    mutant = MUTANTS[name]
    text = (SOURCE / Path(*mutant.module.split("."))).with_suffix(".py").read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(
            f"mutant {name!r}: {mutant.module} has its text {text.count(mutant.before)} times, must have it once"
        )
    return text.replace(mutant.before, mutant.after)


class _Planting(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads one module from another source."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(
        self, fullname: str, path: object = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def get_source(self, fullname: str) -> str:
        return self._source


def plant(name: str) -> None:
    """Have this process import the module of a mutant with its fault."""
    module = MUTANTS[name].module
    if module in sys.modules:
        raise RuntimeError(f"{module} has been imported already")
    sys.meta_path.insert(0, _Planting(module, patched(name)))


class Found(NamedTuple):
    """What a search for a mutant has come to. `seed` is None if it was not found."""

    seed: int | None
    seconds: float  # of CPU time, with the start of the process
    fault: str


class Ledger:
    """What has been found, kept in a file for as long as the source and the simulation are the same."""

    def __init__(self, path: Path = _STATE) -> None:
        self._path = path
        self._digest = _digest_of_the_source()
        state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found = {name: Found(*each) for name, each in state.get("found", {}).items()}
        if state.get("source") != self._digest:
            self.found = {}

    def note(self, name: str, found: Found) -> None:
        """Keep what was found of `name`."""
        self.found[name] = found
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(json.dumps({"source": self._digest, "found": self.found}))


def _digest_of_the_source() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for folder in (SOURCE / "weir", Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            if not path.name.startswith("test_"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def sought(name: str, seconds: float, first: int = 0) -> Found:
    """Look for a mutant in a process of its own, for so many seconds of CPU time. An exception in the simulation itself is no finding."""
    command = [sys.executable, "-m", "tests.simulated", "--mutant", name, "--seconds", str(seconds), "--first", str(first)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)  # the time of this one, whatever others run
        process.returncode = os.waitstatus_to_exitcode(status)
    took = usage.ru_utime + usage.ru_stime
    seen = _SEEN.search(said)
    return Found(None, took, said.strip().rpartition("\n")[2]) if seen is None else Found(int(seen[1]), took, seen[2])


def table(found: dict[str, Found]) -> str:
    """Return the table of the page: for each kind, how many faults were found, and the CPU time of the slowest."""
    rows = ["| kind of fault | planted | found | slowest, CPU s |", "| --- | --- | --- | --- |"]
    for kind, names in KINDS.items():
        sought_for = [found[name] for name in names if name in found]
        if sought_for:
            seen = sum(each.seed is not None for each in sought_for)
            rows.append(f"| {kind} | {len(sought_for)} | {seen} | {max(each.seconds for each in sought_for):.1f} |")
    return "\n".join(rows)


def main() -> int:
    """Look for each mutant, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.simulated.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="which; by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time, for which each is sought")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="how many are sought at a time; by default one for each CPU",
    )
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--write", action="store_true", help="put the table into docs/explanation/testing.md")
    chosen = parser.parse_args()
    ledger = Ledger(_STATE.with_stem(f"mutants-{chosen.first}"))
    names = chosen.names or list(MUTANTS)
    left = [name for name in names if name not in ledger.found or ledger.found[name].seed is None]
    with ThreadPoolExecutor(chosen.jobs) as threads:
        searches = {threads.submit(sought, name, chosen.seconds, chosen.first): name for name in left}
        for search in as_completed(searches):
            ledger.note(searches[search], search.result())
            print(searches[search], *search.result(), flush=True)
    found = {name: each for name, each in ledger.found.items() if name in names}
    print(table(found))
    if chosen.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")
    wrong = _wrong_without_a_fault({each.seed for each in found.values() if each.seed is not None})
    print(*wrong, sep="\n", end="\n" if wrong else "")
    missed = [name for name, each in found.items() if each.seed is None or each.seconds > chosen.seconds]
    print(f"{len(found) - len(missed)} of {len(found)} found within {chosen.seconds:g} s of CPU time; missed: {missed}")
    return int(bool(missed or wrong))


def _wrong_without_a_fault(seeds: set[int]) -> list[str]:
    """Return what is wrong with `seeds` if nothing is planted: then they find nothing."""
    from tests.simulated.plans import draw_plan  # not before: a process that plants a fault imports this module first
    from tests.simulated.world import simulate

    faults = {seed: simulate(draw_plan(seed)).fault for seed in sorted(seeds)}
    return [f"seed {seed} fails without a planted fault: {fault}" for seed, fault in faults.items() if fault]


if __name__ == "__main__":
    sys.exit(main())
