"""The first code of the template of fronts: a process with one thread that loads what fronts need, once, and forks each of them.

`python -m weir.fronts.entry`, with the arguments of weir.workers.process.entry, of which it is the counterpart.
"""

import gc
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from weir.wire.frames import FrameParser, Start
from weir.workers.process.channel import ChildChannel, ServerSocket
from weir.workers.process.entry import prepare

if TYPE_CHECKING:
    from weir.fronts.front import FrontConfig


def main(arguments: list[str]) -> int:
    """Run the template until the server leaves; return the exit code."""
    _, _, parent, cpus, descriptor = arguments
    prepare(int(parent), [int(cpu) for cpu in cpus.split(",") if cpu])
    from weir.frontends.grpc import SILENT, VERBOSITY
    from weir.frontends.http.server import tls_context  # only now: these load libraries
    from weir.fronts import front
    from weir.workers.process.program import READY, obey

    os.environ.setdefault(VERBOSITY, SILENT)  # before the configuration is read, which may import gRPC
    server = ServerSocket(fileno=int(descriptor))
    os.set_inheritable(server.fileno(), False)
    start = ChildChannel(server, FrameParser(), None).receive()
    if not isinstance(start, Start):
        return 0  # the server has left
    config: FrontConfig = start.options["config"]
    if config.grpc is not None:
        from weir.fronts import calls  # noqa: F401  # shared by all fronts
    tls = tls_context(config.http)
    if config.product is not None:
        config.product.load()
    gc.collect()
    gc.freeze()  # the collector would write to what fronts share

    def become(options: dict[str, Any], descriptors: Sequence[int], own: int) -> NoReturn:
        _be_front(partial(front.run_front, config), tls, options, descriptors, own)

    server.sendall(READY)
    try:
        return obey(server, become)
    except ConnectionError:  # the server has left without reading the last response
        return 0


def _be_front(run: Any, tls: Any, options: dict[str, Any], descriptors: Sequence[int], template: int) -> NoReturn:
    """Run as a front until the end. Libraries are not shut down then, as nothing of theirs was begun here."""
    from weir.fronts.front import FrontEnds

    code = 1
    try:
        os.setpgid(0, 0)
        prepare(template, ())
        for each in descriptors:
            os.set_inheritable(each, False)
        link, connections, figures, *listening = descriptors
        sockets = [socket.socket(fileno=each) for each in (link, connections, *listening)]
        run(FrontEnds(sockets[0], sockets[1], figures, sockets[2:], options["index"], tls))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
