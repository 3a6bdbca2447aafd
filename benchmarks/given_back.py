"""What a server of texts has of memory before, during and after a large request. `python -m benchmarks.given_back MODEL [--texts N]`.

Memory is what each process has for itself (USS). The server has a minute to give back what it took; the exit code is 1 if it keeps more than KEPT of
what it had before.
"""

import argparse
import sys
import threading
import time
import urllib.request

import msgspec
import psutil

from benchmarks.harness.result import mebibytes
from weir.bench.vectors import text_server

KEPT = 1.5  # times what it had before
PATIENCE = 40.0


def memory(process: psutil.Process) -> tuple[float, float]:
    """Return the bytes of the process that listens, and of those below it."""
    below = [each.memory_full_info().uss for each in process.children(recursive=True)]
    return float(process.memory_full_info().uss), float(sum(below))


def ask(url: str, texts: list[str]) -> int:
    """Ask for the vectors; return how many bytes the answer has."""
    body = msgspec.json.encode({"id": 1, "texts": texts})
    head = {"Content-Type": "application/json", "Accept": "application/json", "X-Request-Timeout": "3600"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/encode", body, head), timeout=3600) as answer:
        return len(answer.read())


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser("benchmarks.given_back", description=__doc__)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("--texts", type=int, default=100_000)
    asked = parser.parse_args()
    with text_server([asked.model, "--device-map", "cpu", "--no-calibrate"]) as server:
        (process,) = [each for each in psutil.Process().children() if "weir" in " ".join(each.cmdline())]
        ask(server.http, [f"warm {number}" for number in range(500)])
        time.sleep(1.0)
        before, most = memory(process), [0.0, 0.0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                most[:] = map(max, most, memory(process))

        watching = threading.Thread(target=watch)
        watching.start()
        began = time.monotonic()
        size = ask(server.http, [f"a text of its own, number {number}" for number in range(asked.texts)])
        seconds = time.monotonic() - began
        done.set()
        watching.join()
        after = memory(process)
        began = time.monotonic()
        while memory(process)[0] > KEPT * before[0] and time.monotonic() < began + PATIENCE:
            time.sleep(0.5)
        rest = memory(process)
        waited = time.monotonic() - began
    print(
        f"{asked.texts:,} texts in {seconds:.1f} s, an answer of {mebibytes(size)} MiB; MiB of the server and of its workers:"
    )
    rows = {"before": before, "at most": most, "right after": after, f"{waited:.0f} s later": rest}
    for name, (own, below) in rows.items():
        print(f"{name:14} {mebibytes(own):>8} {mebibytes(below):>8}")
    return int(rest[0] > KEPT * before[0])


if __name__ == "__main__":
    sys.exit(main())
