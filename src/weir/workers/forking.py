"""The process that workers are forked from: `python -m weir.workers.forking`, run by template.py with its end of a socket."""

import errno
import gc
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from weir.model import Model
from weir.wire.frames import Frame, FrameParser, Start
from weir.workers.priority import give_way
from weir.workers.process import die_with, ignore_terminal_signals, set_affinity

RECEIVE_BYTES = 256 << 10


def main(arguments: list[str]) -> int:
    """Load what is shared; then fork a worker, or reap one, each time that the server asks. Returns the exit code."""
    name, parent, niceness, cpus, descriptor = arguments
    die_with(int(parent))
    if cpus:
        set_affinity([int(cpu) for cpu in cpus.split(",")])
    ignore_terminal_signals()
    take_back = give_way(int(niceness))
    server = socket.socket(fileno=int(descriptor))
    os.set_inheritable(server.fileno(), False)
    start = _started(server)
    try:
        shared = _load(start)
    except BaseException:
        traceback.print_exc()
        print(f"weir: {name}: nothing is shared by its workers, each loads by itself", file=sys.stderr)  # noqa: T201 - there is no logging yet
        return 1
    take_back()
    server.sendall(b"1")
    return _obey(server, shared)


def _obey(server: socket.socket, shared: Model) -> int:
    own = os.getpid()
    while True:
        text, descriptors, _, _ = socket.recv_fds(server, RECEIVE_BYTES, 3)
        if not text:
            return 0  # the server has left
        asked = json.loads(text)
        if "reap" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["reap"], 0)[1])
        else:
            answer = _fork()
            if answer == 0:
                server.close()
                _be_worker(asked["fork"], descriptors, shared, own)
            for each in descriptors:
                os.close(each)
            with suppress(OSError):  # here too: whoever is told its number may kill the group at once
                os.setpgid(answer, answer)
        server.sendall(str(answer).encode())


def _fork() -> int:
    """Fork. Returns a number below 0, that of the error, if the system refuses: the workers there are live on."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _started(server: socket.socket) -> Start:
    parser = FrameParser()
    frames: list[Frame] = []
    while not frames:
        data = server.recv(RECEIVE_BYTES)
        if not data:
            sys.exit(0)  # the server has left
        frames = parser.feed(data)
    (start,) = frames
    assert isinstance(start, Start)
    return start


def _load(start: Start) -> Model:
    """Return the model, with what it shares."""
    from weir.workers.program import configure_logging
    from weir.workers.source import unpack_source

    sys.path[:] = start.options["path"]
    known = list(logging.getLogger().handlers)
    configure_logging(start.options["name"], None)
    mine = [handler for handler in logging.getLogger().handlers if handler not in known]
    assert isinstance(start.target, bytes)
    model_class, params = unpack_source(start.target)
    model = model_class(**params)
    model.max_batch_size = start.options["max_batch_size"]  # type: ignore[misc]  # what holds here, not the class's default
    model.load_shared()
    for handler in mine:
        logging.getLogger().removeHandler(handler)  # a worker's has its number
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, and so would make each worker a copy of it
    return model


def _be_worker(asked: dict[str, Any], descriptors: Sequence[int], model: Model, template: int) -> NoReturn:
    """Be a worker to its end, as `weir.workers.process` is. Libraries are left as they are then: they would look for the threads that the template had."""
    from weir.workers.program import run

    os.setpgid(0, 0)
    die_with(template)
    ignore_terminal_signals()
    take_back = give_way(asked["niceness"])
    refusal = set_affinity(asked["cpus"]) if asked["cpus"] else None
    given = iter(descriptors)
    end = next(given)
    request_fd = next(given) if asked["request_bytes"] else -1
    result_fd = next(given) if asked["result_bytes"] else -1
    try:
        code = run(
            end, request_fd, asked["request_bytes"], result_fd, asked["result_bytes"], refusal=refusal, loaded=take_back,
            shared=model,
        )  # fmt: skip
    except BaseException:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
