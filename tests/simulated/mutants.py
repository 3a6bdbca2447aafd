"""Faults of the kinds that Weir has had, planted one at a time: `python -m tests.simulated.mutants [--seconds 60] [--write] [NAME ...]`.

Each is planted in a process of its own (see tests/faults/planting.py). The simulation must find every one; a table says how soon. `--write` puts it into
docs/explanation/testing.md.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import planting
from tests.faults.planting import Fault, forgets, gives, mistakes, skips, takes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "explanation" / "testing.md"
BEGIN, END = "<!-- mutants: written by `python -m tests.simulated.mutants --write` -->", "<!-- end of mutants -->"
_SEEN = re.compile(r"^seed (\d+): (.*)", re.MULTILINE)

CONNECTION = "weir.frontends.http.fast.connection:"
HANDOVER = "weir.frontends.http.fast.handover:UvicornConnection."
CHANNEL = "weir.workers.process.channel:Channel."
DRIVER = "weir.serving.driver:Driver."
RELAY = "weir.fronts.passing:_End."
FRONT = "weir.fronts.dispatcher:ConnectedFront."
PUBLISHER = "weir.text_server.bert_as_service.zeromq:Publisher."
MANAGER = "weir.catalog.manager:Manager."
RESIDENTS = "weir.policy.residency:Residents."
TURNS = "weir.workers.turns:DeviceTurns."
SHARED = "weir.batching.workers:SharedWorkers."
SCALING = "weir.policy.scaling:WorkerScaling."


def _another_id(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any) -> Any:
        response = make(*arguments)
        response.id = "1"
        return response

    return made


def _other_form(end: Callable[..., None]) -> Callable[..., None]:
    def ended(request: Any, error: Exception) -> None:
        apis = import_module("weir.text_server.fronts").text_apis(request.texts.context)
        request.exchange.errors = apis[0].texts[0].endpoint.errors
        end(request, error)

    return ended


def _reset_first(report: Callable[[Any], None]) -> Callable[[Any], None]:
    def reported(counting: Any) -> None:
        counting._reset()
        report(counting)

    return reported


def _other_name(step: Callable[..., Any]) -> Callable[..., Any]:
    async def stepped(*arguments: Any) -> Any:
        from weir.errors import ModelNotFound, ModelNotReady

        try:
            return await step(*arguments)
        except ModelNotFound as error:
            raise ModelNotReady(error.message) from error

    return stepped


def _reversed(encoded: Callable[..., Any]) -> Callable[..., Any]:
    def reversing(*arguments: Any) -> Any:
        found = encoded(*arguments)
        return found._replace(vectors=found.vectors[::-1])

    return reversing


def _leaves_first(step: Callable[..., Any]) -> Callable[..., Any]:
    async def stepped(driver: Any) -> None:
        if driver.turns is not None:
            await driver.turns.close()
        await step(driver)

    return stepped


def _once(_: Any) -> Callable[..., Any]:
    async def replaced(fronts: Any, index: int, lived: float) -> None:
        await fronts._start(index)

    return replaced


def _nothing(_: Any) -> Callable[..., Any]:
    async def nothing(*_: Any) -> None:
        pass

    return nothing


# By the kinds of faults that Weir has had.
KINDS = {
    "a status or a name missing in a table": {
        "status-missing": Fault("weir.wire.status:TABLE", value=lambda table: {kind: codes for kind, codes in table.items() if kind.__name__ != "Conflict"}),
        "status-of-one-protocol": Fault("weir.wire.status:_KSERVE", value=lambda codes: {422: 400}),
        "name-of-the-error-missing": Fault("weir.protocols.kserve:error_response", takes("isinstance(error, WeirError)", "False")),
    },
    "an error as a value, or another's error": {
        "error-as-value": Fault("weir.messages:Events.__init__", takes("has_failed(outputs)", "False")),
        "wrong-length-accepted": Fault("weir.workers.run.steps:responses_of", takes("len(returned) == count", "True")),
        "failure-of-one-for-all": Fault("weir.workers.run.steps:TogetherStep._run", takes("self._halves", "False")),
    },
    "a forgotten charge": {
        "charge-kept": Fault(CONNECTION + "ResponseWriter._release_claim", skips("claim.close")),
        "charge-of-what-waits-kept": Fault(CONNECTION + "ResponseWriter.leave", skips("self.shared.account.give")),
        "charge-of-unread-kept": Fault(CONNECTION + "ResponseWriter._forget_unread", skips("self.shared.account.give")),
    },
    "a lost wake-up": {
        "wake-up-lost-of-a-group": Fault("weir.batching.batcher:Batcher.submit", skips("wake")),
        "wake-up-lost-of-a-turn": Fault(DRIVER + "_poll_arrivals", forgets("self._polling")),
        "timer-not-armed-again": Fault(DRIVER + "_timer_due", skips("_arm")),
        "earlier-deadline-not-armed": Fault("weir.workers.timer:Timer.arm", takes("self.armed <= when", "True")),
        "next-request-forgotten": Fault(CONNECTION + "ResponseWriter.request_ended", skips("_advance")),
        "reading-never-resumed": Fault(CONNECTION + "Connection.regulate_reading", skips("resume_reading")),
        "answers-of-a-turn-kept": Fault(FRONT + "new_responses", skips("call_soon")),
        "bulk-never-cut": Fault("weir.batching.batcher:Batcher.poll", skips("_cut_bulk")),
    },
    "a settled request answered again, or no end": {
        "settled-answered-again": Fault("weir.batching.request_state:finish_each", takes("request.settled", "False")),
        "expired-not-settled": Fault("weir.batching.queue:RequestQueue.passed", skips("settle")),
        "end-not-noted": Fault("weir.serving.delivery:Delivery.cancelled", skips("_had_their_end")),
        "half-of-a-dead-batch-lost": Fault("weir.batching.retry:CrashRetry._halve", mistakes("(entries[:middle], entries[middle:])", "(entries[:middle],)")),
        "cancelled-message-without-end": Fault("weir.frontends.websocket:SocketCall.release", skips("fail")),
        "refusal-kept-from-a-front": Fault(FRONT + "_enter", skips("self.fail")),
        "handed-back-nowhere": Fault(FRONT + "_submit", skips("put")),
        "crash-tried-for-ever": Fault("weir.batching.retry:CrashRetry.died", takes("last_tries", "False")),
        "late-once-more": Fault("weir.batching.batcher:Batcher.poll", skips("sweep")),
    },
    "a deadline that does not hold": {
        "answer-after-the-deadline": Fault(DRIVER + "deliver", takes("dispatch.due <= now", "False")),
        "running-never-expires": Fault("weir.batching.batcher:Batcher.expire", mistakes("self._running.passed(now)", "()")),
        "timeout-of-the-caller-ignored": Fault("weir.protocols.native:_read_timeout", forgets("options.timeout")),
        "body-never-too-slow": Fault("weir.protocols.account:Pace.too_slow", takes("self._spent > 1.0", "False")),
        "expired-runs-again": Fault("weir.batching.batcher:Batcher.poll", skips("_settle_late")),
    },
    "a bound that does not hold": {
        "room-without-end": Fault("weir.batching.queue:RequestQueue.room", value=gives(True)),
        "left-stays-in-queue": Fault("weir.batching.batcher:Batcher.cancel", takes("request.taken < request.form.rows", "False")),
        "place-never-free": Fault(DRIVER + "deliver", mistakes("self.batcher.finished(events.batch_id, now)", "self.batcher._take_back(events.batch_id)")),
        "bulk-without-end": Fault("weir.batching.batcher:Batcher._submit_bulk", skips("queue.room", "True")),
        "bulk-in-the-wrong-queue": Fault("weir.batching.batcher:Batcher.cancel", skips("is_bulk", "False")),
        "former-generation-kept": Fault("weir.serving.service:Replaced.stop", skips("remove")),
    },
    "an answer in the wrong order or form": {
        "pieces-out-of-order": Fault("weir.batching.request_state:TensorGather.result", mistakes("sorted", "list")),
        "form-of-another-protocol": Fault(CONNECTION + "ResponseWriter._handler", mistakes("(BODY, LARGE, SKIP, BUSY)", "(BODY, LARGE, SKIP)")),
        "form-of-the-next-request": Fault(HANDOVER + "_refuse", mistakes("first.scope['raw_path']", "self.url")),
        "refused-for-the-next-request": Fault(HANDOVER + "send_400_response", mistakes("self.busy", "refusal is None and self.busy")),
        "content-taken-for-framing": Fault(HANDOVER + "_piece_size", mistakes("self._held.rfind(END_OF_HEAD, 0, _PIECE_OF_CHUNKS)", "self._held.find(END_OF_HEAD, _PIECE_OF_CHUNKS)")),
        "vectors-in-another-order": Fault("weir.text_server.encoder:Encoder._encoded", value=_reversed),
        "message-of-another-id": Fault("weir.protocols.exchange:response_of", value=_another_id),
        "keys-mixed": Fault("weir.batching.queue:RequestQueue.enter", mistakes("request.form.key", "None")),
        "slow-stream-loses-parts": Fault(DRIVER + "deliver", mistakes("refused", "()")),
        "part-after-the-end": Fault("weir.batching.collate:responses_in", takes("request.settled", "False")),
    },
    "work for nobody": {
        "left-cancelled-nowhere": Fault(CONNECTION + "ResponseWriter.leave", skips("request.leave")),
        "left-cancelled-for-the-last-only": Fault(HANDOVER + "_end_all", mistakes("self._open", "()")),
        "expired-computed": Fault(DRIVER + "_expire", skips("where", "()")),
        "rest-of-a-failed-request-computed": Fault(DRIVER + "deliver", takes("events.kinds is not None", "False")),
        "call-goes-on-for-nobody": Fault("weir.frontends.grpc.call:IncomingCall._leave", skips("on_left")),
        "front-does-not-withdraw": Fault("weir.fronts.remote:Requests.cancel", skips("put")),
        "requests-of-a-dead-front-stay": Fault(FRONT + "close", skips("request.withdraw")),
        "withdrawn-in-the-table-only": Fault(FRONT + "_withdraw", skips("withdraw")),
    },
    "a drain or a reload that cuts off": {
        "drain-does-not-wait": Fault(DRIVER + "_note_if_emptied", takes("self.batcher.is_empty", "True")),
        "former-generation-forgotten": Fault("weir.serving.service:Service.cancel", skips("accepted", "False")),
        "reload-does-not-wait": Fault("weir.serving.service:Replaced.stop", mistakes("drain_timeout", "0.0")),
        "removed-worker-served": Fault(DRIVER + "remove_worker", skips("worker_lost")),
    },
    "what passes through several fronts": {
        "call-not-withdrawn-onward": Fault("weir.frontends.grpc.aio:Relay._pass", skips("onward.cancel")),
        "call-passed-on-nowhere": Fault("weir.fronts.calls:FrontCall.pass_on", skips("_pass_on")),
        "name-of-an-error-lost-onward": Fault("weir.frontends.grpc.aio:_return", mistakes("trailers", "()")),
        "end-of-a-stream-not-passed-on": Fault("weir.frontends.grpc.aio:_send", skips("done_writing")),
        "form-of-another-api": Fault("weir.text_server.http:HttpTextCall.fail", value=_other_form),
        "turn-of-a-withdrawn-text-kept": Fault("weir.fronts.dispatcher:RemoteText.withdraw", skips("leave")),
        "turn-of-a-failed-text-kept": Fault("weir.fronts.dispatcher:RemoteText.fail", skips("leave")),
        "texts-cut-off-by-a-drain": Fault("weir.fronts.server:FrontsServer.drain_product", skips("drain_product", "True")),
        "front-with-many-texts-ended": Fault(FRONT + "_checked", mistakes("self._catalogue.most_texts", "0")),
        "front-started-twice": Fault("weir.fronts.server:Fronts._ended", takes("had_started", "True")),
        "front-refused-once-never-replaced": Fault("weir.fronts.server:Fronts._replace", value=_once),
        "connection-on-its-way-not-counted": Fault("weir.protocols.account:SharedAccount.pass_on", forgets("self._passed_on")),
        "counts-of-a-front-lost": Fault("weir.text_server.fronts:Counting.report", value=_reset_first),
        "place-of-a-request-never-free": Fault("weir.fronts.places:_InPlace.release", skips("self._place.release")),
        "place-freed-while-it-is-read": Fault("weir.fronts.places:_InPlace.__init__", skips("retain")),
    },
    "a cut or slow link of a front": {
        "reset-of-a-link-not-expected": Fault(CHANNEL + "_receive", mistakes("OSError", "PermissionError")),
        "cut-front-never-replaced": Fault("weir.fronts.server:Fronts._ended", takes("had_started", "False")),
        "cut-front-lives-on": Fault("weir.fronts.server:Fronts._ended", skips("self._processes.kill")),
        "message-sent-in-part-begun-again": Fault(CHANNEL + "send", mistakes("memoryview(frame)[sent:]", "memoryview(frame)")),
        "half-message-read-again": Fault("weir.wire.frames:FrameReader.feed", takes("data is self._held", "False")),
        "silent-front-never-replaced": Fault("weir.fronts.server:Fronts.sweep", skips("self._ended")),
    },
    "ZeroMQ": {
        "kept-response-sent-again": Fault(PUBLISHER + "_take", mistakes("self._kept.pop(topic, [])", "self._kept.get(topic, [])")),
        "room-of-a-response-never-free": Fault(PUBLISHER + "made", skips("self._reserve")),
        "unread-of-a-lost-peer-charged": Fault(PUBLISHER + "forget", skips("self.account.give")),
        "half-message-of-a-lost-peer-charged": Fault("weir.text_server.bert_as_service.port:Peer.connection_lost", skips("self._port.account.give")),
        "never-read-again-after-a-pause": Fault("weir.text_server.bert_as_service.zeromq:ZeroMqFrontend._changed", skips("self._in.resume")),
        "error-of-the-model-tried-for-ever": Fault("weir.text_server.bert_as_service.zeromq:RequestHandler._wait_after", takes("error.ran", "False")),
    },
    "TLS": {
        "descriptor-of-a-connection-kept": Fault("weir.frontends.http.server:_Accepted.connection_made", skips("abort")),
        "handshake-without-end": Fault("weir.frontends.http.server:HttpServer._accept", mistakes("patience", "1e9")),
        "failed-handshake-not-expected": Fault("weir.frontends.http.server:HttpServer._accept", mistakes("OSError", "BlockingIOError")),
        "bytes-before-a-relay-lost": Fault("weir.fronts.passing:Relays.begin", mistakes("replay", "b''")),
        "end-of-a-relay-not-passed-on": Fault(RELAY + "connection_lost", skips("self.other.transport.close")),
        "relay-never-read-again": Fault(RELAY + "resume_writing", skips("resume_reading")),
    },
    "a load, an unload or an eviction that goes wrong": {
        "unload-does-not-wait": Fault(MANAGER + "_unload_model", mistakes("self._stopped(ending.values())", "asyncio.gather(*[each.stop(0.0) for each in ending.values()], return_exceptions=True)")),
        "unloaded-still-there": Fault(MANAGER + "_keep", skips("self.registry.remove")),
        "replaced-never-stopped": Fault(MANAGER + "_retire", value=_nothing),
        "drain-cuts-off-a-change": Fault(MANAGER + "_stopped", mistakes("outcome_of", "asyncio.ensure_future")),
        "index-lies": Fault("weir.catalog.manager:ModelStates._of", takes("service.ready", "True")),
        "busy-model-evicted": Fault(RESIDENTS + "_victims", mistakes("not is_idle(name)", "False")),
        "failed-load-keeps-its-memory": Fault(RESIDENTS + "failed", skips("_move")),
        "load-begins-twice": Fault(RESIDENTS + "ask", mistakes("model.presence not in IN_MEMORY", "model.presence is not Presence.LOADED")),
        "loaded-for-nobody": Fault(RESIDENTS + "_wait", takes("now < model.expected[1]", "True")),
        "memory-taken-before-it-is-free": Fault(RESIDENTS + "next_step", mistakes("self.used", "self._staying")),
    },
    "versions, chains, and workers that callers add": {
        "error-of-a-step-under-another-name": Fault("weir.catalog.chains:ItemWalk._step", value=_other_name),
        "step-unloaded-under-its-chain": Fault(MANAGER + "_check_dependents", skips("_dependents", "[]")),
        "added-workers-forgotten-by-a-load": Fault(MANAGER + "_give_workers", skips("added", "0")),
        "other-versions-lost-by-a-load": Fault(MANAGER + "_load_model", takes("version and key != version", "False")),
        "default-lost-by-an-unload": Fault(MANAGER + "_keep", skips("default_of")),
        "version-of-a-request-ignored": Fault("weir.catalog.registry:Registry.get", mistakes("self._find(name, version)", "self._find(name, '')")),
        "model-unloaded-with-a-worker": Fault(MANAGER + "_unload_worker", takes("worker_count", "False")),
    },
    "models that take turns on a device": {
        "two-models-at-one-place": Fault(SHARED + "_hold", skips("worker_away")),
        "warm-up-without-a-turn": Fault(TURNS + "_take_turn", takes("self._running", "False")),
        "place-of-a-lost-worker-kept": Fault(TURNS + "worker_lost", skips("gave_up")),
        "place-of-a-stopped-model-kept": Fault(SHARED + "remove", skips("gave_up")),
        "place-never-offered-again": Fault(TURNS + "ended", skips("ended")),
        "device-left-before-the-workers-end": Fault(DRIVER + "_end_workers", value=_leaves_first),
        "warm-up-keeps-its-turn": Fault(SHARED + "release", skips("gave_up")),
    },
    "a clock that jumps": {
        "deadline-by-the-wall-clock": Fault("weir.frontends.grpc.call:IncomingCall.time_remaining", mistakes("time.monotonic()", "time.time()")),
        "date-by-the-clock-of-timers": Fault("weir.frontends.http.fast.shared:HttpShared.on_second", mistakes("self._clocks.time_of_day()", "self._clocks.now()")),
        "sweep-by-the-wall-clock": Fault("weir.frontends.http.fast.shared:HttpShared.on_second", mistakes("self._clocks.now()", "self._clocks.time_of_day()")),
        "standstill-counted": Fault("weir.frontends.http.fast.shared:HttpShared.on_second", mistakes("min(passed, _LATE)", "passed")),
    },
    "a number of workers that does not follow the load": {
        "more-workers-than-allowed": Fault(SCALING + "_wanted", takes("kept > self.allowed.most", "False")),
        "fewer-workers-than-allowed": Fault(SCALING + "_wanted", takes("kept < self.allowed.least", "False")),
        "idle-workers-kept": Fault(SCALING + "_is_idle", value=gives(False)),
        "cold-start-not-at-once": Fault(DRIVER + "_poll_arrivals", skips("self._no_worker")),
        "no-more-than-one-worker": Fault("weir.tuning.workers:WorkerTuner._resize", mistakes("min(wanted, self._rule.allowed.most - leaving)", "min(wanted, 1)")),
    },
    "a solved policy that does not follow": {
        "tables-for-former-workers": Fault("weir.tuning.policy_tuner:PolicyTuner.worker_changed", skips("_update")),
    },
    "readiness or metrics that do not follow": {
        "never-ready-again": Fault(DRIVER + "worker_ready", forgets("self.not_ready_reason")),
        "ready-without-workers": Fault(DRIVER + "unavailable", forgets("self.not_ready_reason")),
        "counted-twice": Fault("weir.telemetry.recorder:Recorder.answered", mistakes("arrivals_of(requests)", "arrivals_of([*requests, *requests[:error is not None]])")),
        "counted-at-another-frontend": Fault("weir.telemetry.recorder:Recorder.answered", takes("sources.count(first) < count", "False")),
    },
}  # fmt: skip
MUTANTS: dict[str, Fault] = {name: fault for faults in KINDS.values() for name, fault in faults.items()}


def plant(name: str) -> None:
    """Have this process import the module of a mutant with its fault."""
    planting.plant(MUTANTS[name])


class Found(NamedTuple):
    """What a search for a mutant has come to. `seed` is None if it was not found."""

    seed: int | None
    seconds: float  # of CPU time, with the start of the process
    fault: str


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
        if tried := [found[name] for name in names if name in found]:
            seen = sum(each.seed is not None for each in tried)
            rows.append(f"| {kind} | {len(tried)} | {seen} | {max(each.seconds for each in tried):.1f} |")
    return "\n".join(rows)


def main() -> int:
    """Look for each mutant, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.simulated.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="which; by default all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU time, for which each is sought")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many are sought at a time")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--write", action="store_true", help="put the table into docs/explanation/testing.md")
    chosen = parser.parse_args()
    found: dict[str, Found] = {}
    with ThreadPoolExecutor(chosen.jobs) as threads:
        names = chosen.names or list(MUTANTS)
        searches = {threads.submit(sought, name, chosen.seconds, chosen.first): name for name in names}
        for search in as_completed(searches):
            found[searches[search]] = search.result()
            print(searches[search], *search.result(), flush=True)
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
