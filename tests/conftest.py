"""Property tests give the same examples in every run, however slow the machine; a check for leaks, for those that ask;
the garbage collector passes over what was there before the first test; solving does not give way to other tests; linear
algebra runs in one thread; clients of HTTP read one certificate instead of all that the world trusts, and wait longer than
a busy machine takes; and SIGHUP and SIGINT mean what they do in a terminal."""

import asyncio
import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib import import_module
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings
from tests.leaks import no_leaks
from tests.template import start

# Before anything loads numpy: the tests run on all processors already, and OpenBLAS's threads spin while they wait for each
# other. A solved bank took eight times as much processor time with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test speaks TLS to a server that is not its own, but each client of httpx reads all certificates of the system's authorities,
# in 30 ms of processor time, and the tests make a thousand clients.
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).parent / "authority.pem"))
# Before anything loads gRPC: servers in a test read their sockets as servers by themselves do (weir.frontends.grpc, CORE_VARIABLES).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
# What says no timeout would have 5 s for each of these.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 200.0)
# Under `nohup`, or in the background of a script, the processes that tests start would ignore these, as they should, and never end by them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("weir", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weir")


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no process, no descriptor and no shared memory behind."""
    with no_leaks():
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_start_soon() -> None:
    """Programs of Weir are forked from one that has loaded it. The one that solves would yield CPUs to others: beside busy tests it would get hardly any."""
    start()
    import_module("weir.tuning").SolvingProcess.__init__.__defaults__ = (0,)


@pytest.fixture(scope="module", autouse=True)
def out_of_the_collectors_sight() -> None:
    """What the modules before have left stays to the end: a check for leaks took a second of processor time for it, late in a run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, of the kind that the fixture `loop_factory` says, if the test uses it."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    factory: Any = pyfuncitem.funcargs.get("loop_factory")
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Take what is collected out of the collector's sight: it stays to the end, and to go through all of it at every
    `gc.collect`, as every check for leaks does twice, takes a third of a second. What tests make is still seen."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
