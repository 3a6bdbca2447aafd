"""Workers never outlive their server, and models from scripts and notebooks reach them: real servers, as subprocesses."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rings import spread, subcases

import weir

SOURCES = [str(Path(weir.__file__).parents[1])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}

SPINNING_SERVER = """
import asyncio, weir

class Spin(weir.Model):
    def predict(self, batch):
        sum(range(10**15))  # never comes back, in C, with the GIL held

async def main():
    async with weir.Service(Spin, workers=2, max_batch_size=1, policy="greedy") as service:
        calls = [service.infer(b"x" * 100_000) for _ in range(2)]
        while service.state(brief=True)["in_flight_batches"] < 2:
            await asyncio.sleep(0.001)
        print(*(state.pid for state in service.executor.states()), flush=True)
        await asyncio.gather(*calls)

asyncio.run(main())
"""

SCRIPT = """
import asyncio
from dataclasses import dataclass
import weir

FACTOR = 3

@dataclass
class Point:
    x: int

def tripled(x):
    return x * FACTOR

class Tripled(weir.Model):
    def predict(self, batch):
        return [Point(tripled(point.x)) for point in batch]

async def main():
    async with weir.Service(Tripled, max_batch_size=2) as service:
        print(await service.infer_many([Point(1), Point(2)]))

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

# A cell runs in the names of __main__, which has no file.
NOTEBOOK = f"""
import sys
exec(compile({SCRIPT!r}, "<cell 1>", "exec"), sys.modules["__main__"].__dict__)
"""


@pytest.mark.parametrize("number", spread([signal.SIGKILL, signal.SIGTERM]))
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


def run(*arguments: object, stdin: str | None = None) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.stderr == ""
    return done.stdout


@subcases("source", ["file", "notebook"])
def test_a_script_without_a_main_guard_works(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = run(script) if source == "file" else run("-", stdin=NOTEBOOK)
    assert printed == "[Point(x=3), Point(x=6)]\n"


def test_types_of_a_script_that_comes_from_standard_input_travel_both_ways() -> None:
    assert run("-", stdin=TYPES).splitlines() == [
        "(<Colour.RED: 1>, Schema(x=2)) True",
        "(<Colour.RED: 1>, Struct(x=2)) True",
        "(<Colour.RED: 1>, Record(x=2)) True",
    ]
