"""Workers never outlive their server, and models from scripts and notebooks reach them: real servers, as subprocesses."""

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import weir

SOURCES = [str(Path(weir.__file__).parents[1])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}

SPINNING_SERVER = """
import asyncio, sys
from weir.messages import Batch, OBJECT
from weir.model import Model
from weir.workers.process.pool import ProcessPool
from weir.workers.settings import WorkerSettings

class Spin(Model):
    def predict(self, batch):
        sum(range(10**15))  # never comes back, in C, with the GIL held

class Listener:
    def __getattr__(self, name):
        return lambda *arguments, **more: None

async def main():
    pool = ProcessPool(Spin, {}, WorkerSettings(workers=2), name="spin", max_batch_size=1)
    await pool.start(Listener())
    for worker in (0, 1):
        pool.run(worker, Batch(worker, [b"x" * 100_000], OBJECT, OBJECT))
    print(*(state.pid for state in pool.states()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""

SCRIPT = """
import asyncio
from dataclasses import dataclass
from weir.messages import Batch, OBJECT
from weir.model import Model
from weir.workers.process.pool import ProcessPool
from weir.workers.settings import WorkerSettings

FACTOR = 3

@dataclass
class Point:
    x: int

def tripled(x):
    return x * FACTOR

class Tripled(Model):
    def predict(self, batch):
        return [Point(tripled(point.x)) for point in batch]

class Listener:
    def __init__(self):
        self.events = asyncio.get_running_loop().create_future()
    def received(self, worker, events):
        self.events.set_result(events)
    def worker_ready(self, worker, places, *, bulk):
        pass

async def main():
    pool, listener = ProcessPool(Tripled, {}, WorkerSettings(), name="tripled", max_batch_size=2), Listener()
    await pool.start(listener)
    pool.run(0, Batch(1, [Point(1), Point(2)], OBJECT, OBJECT))
    print((await listener.events).outputs)
    await pool.stop()

asyncio.run(main())
"""

TYPES = """
import asyncio, dataclasses, enum
import msgspec, pydantic
import weir

class Colour(enum.Enum):
    RED = 1

class Schema(pydantic.BaseModel):
    x: int

class Struct(msgspec.Struct):
    x: int = 5

@dataclasses.dataclass
class Record:
    x: int

async def main():
    for kind in (Schema, Struct, Record):
        class Twice(weir.Model):
            Input = kind
            def predict(self, batch):
                return [(Colour.RED, kind(x=2 * item.x)) for item in batch]
        async with weir.Service(Twice) as service:
            print(await service.infer({"x": 1}), (await service.infer(kind(x=2)))[1] == kind(x=4))

asyncio.run(main())
"""

NOTEBOOK = f"""
names = {{"__name__": "__main__"}}
exec(compile({SCRIPT!r}, "<cell 1>", "exec"), names)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_deep_in_c_end_with_their_server(number: int) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SPINNING_SERVER], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    with server:
        assert server.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in server.stdout.readline().split()]
        server.send_signal(number)
    assert len(pidfds) == 2
    for pidfd in pidfds:
        readable, _, _ = select.select([pidfd], [], [], 2.0)
        os.close(pidfd)
        assert readable, "a worker was still there two seconds after its server"


def run_from_stdin(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(script),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def test_a_script_without_a_main_guard_works_from_a_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=ENVIRONMENT, check=False)

    assert (done.stdout, done.stderr) == ("[Point(x=3), Point(x=6)]\n", "")


def test_a_script_from_standard_input_works() -> None:
    assert run_from_stdin(SCRIPT) == "[Point(x=3), Point(x=6)]\n"


def test_types_of_a_script_travel_both_ways() -> None:
    assert run_from_stdin(TYPES).splitlines() == [
        "(<Colour.RED: 1>, Schema(x=2)) True",
        "(<Colour.RED: 1>, Struct(x=2)) True",
        "(<Colour.RED: 1>, Record(x=2)) True",
    ]


def test_a_model_from_a_notebooks_cell_works() -> None:
    script = NOTEBOOK.replace("names = ", "import sys\nnames = ", 1)
    # A cell runs in the names of __main__, which has no file.
    script = script.replace('{"__name__": "__main__"}', 'sys.modules["__main__"].__dict__')
    assert run_from_stdin(script) == "[Point(x=3), Point(x=6)]\n"
