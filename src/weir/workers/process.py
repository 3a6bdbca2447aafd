"""The program of a worker process: `python -m weir.workers.process`, started by launch.py with inherited descriptors.

Nothing may be imported here that a model does not need: every worker pays for it at each start.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from types import FrameType

from weir.errors import SettingsError, WeirError
from weir.wire.frames import FrameParser, Ready, Start, StartFailed, encode_control
from weir.workers.arena import Arena, Mapping
from weir.workers.child_channel import ChildChannel
from weir.workers.faults import model_error
from weir.workers.places import PayloadFetch, ResultPlaces
from weir.workers.runner import Runner
from weir.workers.serving import serve, serve_ahead
from weir.workers.source import unpack_source

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Be the worker that `arguments` describe (see Launch.start), to its end. Returns the exit code."""
    parent, end, *arenas = map(int, arguments[1:])
    die_with(parent)
    ignore_terminal_signals()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper: nobody has replaced it yet
    with socket.socket(fileno=end) as channel_end:
        channel_end.set_inheritable(False)
        channel, places = connect(channel_end, *arenas)
        start = channel.receive()
        if not isinstance(start, Start):
            return 0  # the server has left
        try:
            runner = build(start, channel)
        except BaseException as error:  # whatever the model raised, SystemExit too, is told to the server
            what = f"starting worker {start.options['index']} of {start.options['name']!r}"
            failure = error if isinstance(error, WeirError) else model_error(what, error)
            channel.send(encode_control(StartFailed(failure)))
            return 1
        channel.send(encode_control(Ready()))
        loop = serve_ahead if start.options["pipeline_depth"] > 1 else serve
        loop(channel, runner, places)
        runner.stop()
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, and see that it has not ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def ignore_terminal_signals() -> None:
    """Leave SIGINT and SIGTERM to the server, which ends its workers itself once their batches are done: a service
    manager sends them to every process at once. Processes that the model forks obey them."""
    own = os.getpid()

    def handle(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def connect(
    end: socket.socket, request_fd: int, request_bytes: int, result_fd: int, result_bytes: int
) -> tuple[ChildChannel, ResultPlaces | None]:
    """Return the channel to the server, and where large results go."""
    fetch = places = None
    if request_fd >= 0:
        fetch = PayloadFetch(Mapping(request_fd, request_bytes, writable=False))
        os.close(request_fd)
    if result_fd >= 0:
        os.set_inheritable(result_fd, False)
        places = ResultPlaces(Arena(result_fd, result_bytes))
    return ChildChannel(end, FrameParser(fetch), places), places


def build(start: Start, channel: ChildChannel) -> Runner:
    """Return the model's runner, loaded and warmed up. Raises what the model raises."""
    options = start.options
    sys.path[:] = options["path"]
    configure_logging(options["name"], options["index"])
    if options["cpu_affinity"]:
        set_affinity(options["cpu_affinity"])
    assert isinstance(start.target, bytes)
    model, params = unpack_source(start.target)
    runner = Runner(
        model, params, worker_index=options["index"], max_batch_size=options["max_batch_size"],
        retry_in_halves=options["retry_in_halves"],
    )  # fmt: skip
    runner.start()
    channel.spin = options["spin"]
    gc.collect()
    gc.freeze()  # what the model has loaded lives as long as the worker
    return runner


def configure_logging(name: str, index: int) -> None:
    """Have what the model logs appear on stderr, with the worker it comes from, unless the model decides otherwise."""
    worker = f"{name}/{index}".replace("%", "%%")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s %(levelname)-7s {worker} %(name)s: %(message)s"
    )


def set_affinity(cpus: list[int]) -> None:
    """Run on these CPUs only. SettingsError when the machine refuses."""
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, OverflowError, ValueError) as error:
        allowed = sorted(os.sched_getaffinity(0))
        raise SettingsError(f"cpu_affinity={cpus}: must be among the CPUs {allowed} ({error})") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
