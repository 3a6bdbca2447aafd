"""Faults of the kinds that Weir has had, planted one at a time: `python -m tests.simulated.mutants [--seconds 60] [NAME ...]`.

Each replaces one place of the source as it is imported, in a process of its own. The simulation must find every one; a table says how soon.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src"


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
    "charge-kept": Mutant("weir.frontends.http.fast.response_writer", "            claim.close()\n", ""),
    "charge-of-what-waits-kept": Mutant(
        "weir.frontends.http.fast.response_writer", "        self.shared.account.give(self._counted)\n", ""
    ),
    "charge-of-unread-kept": Mutant(
        "weir.frontends.http.fast.response_writer", "        self.shared.account.give(self._unread)\n", ""
    ),
    "wake-up-lost-of-a-group": Mutant(
        "weir.batching.batcher", "        if group.asleep:\n            queue.scheduler.wake(group)\n", ""
    ),
    "wake-up-lost-of-a-turn": Mutant("weir.serving.driver", "        self._polling = False\n        now", "        now"),
    "settled-answered-again": Mutant(
        "weir.batching.request_state", "        if request.settled:\n            unwanted", "        if False:\n            unwanted"
    ),
    "timer-not-armed-again": Mutant(
        "weir.serving.driver", "        self._poll(Wakeup.TIMER, now)\n        self._arm()\n", "        self._poll(Wakeup.TIMER, now)\n"
    ),
    "answer-after-the-deadline": Mutant(
        "weir.serving.driver", "if self.batcher.is_late(events.batch_id, now):", "if False:"
    ),
    "running-never-expires": Mutant("weir.batching.batcher", "started = list(self._running.passed(now))", "started = []"),
    "left-stays-in-queue": Mutant("weir.batching.batcher", "if request.taken < request.rows:", "if False:"),
    "next-request-forgotten": Mutant(
        "weir.frontends.http.fast.response_writer",
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
        "weir.frontends.http.fast.response_writer", "if self.phase in (BODY, LARGE, SKIP, BUSY):", "if self.phase in (BODY, LARGE, SKIP):"
    ),
    "form-of-the-next-request": Mutant(
        "weir.frontends.http.fast.handover", 'self.url if first is None else first.scope["raw_path"]', "self.url"
    ),
    "content-taken-for-framing": Mutant(
        "weir.frontends.http.fast.handover",
        "self._held.rfind(END_OF_HEAD, 0, _PIECE_OF_CHUNKS) if self._in_body else -1",
        "self._held.find(END_OF_HEAD, _PIECE_OF_CHUNKS) if self._in_body else -1",
    ),
    "left-cancelled-nowhere": Mutant(
        "weir.frontends.http.fast.response_writer", "        if request is not None:\n            request.leave()\n", ""
    ),
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
        "weir.protocols.kserve.protocol", "    if isinstance(error, WeirError):\n        headers.append((ERROR_NAME", "    if False:\n        headers.append((ERROR_NAME"
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


def main() -> int:
    """Look for each mutant, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.simulated.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="which; by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time, for which each is sought")
    chosen = parser.parse_args()
    missed = 0
    print("| mutant | CPU time | what was seen |\n| --- | --- | --- |")
    for name in chosen.names or MUTANTS:
        command = [sys.executable, "-m", "tests.simulated", "--mutant", name, "--seconds", str(chosen.seconds)]
        before = os.times()
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        seen = found.stdout.partition("\n")[0] or found.stderr.strip().rpartition("\n")[2]
        missed += not found.returncode
        print(f"| {name} | {f'{seconds:.1f} s' if found.returncode else 'not found'} | {seen[:160]} |", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
