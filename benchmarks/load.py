"""wrk as the load: one thread, N connections, a fixed body."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("post.lua")


class Load(NamedTuple):
    """What wrk saw. `seconds`, `p50` and `p99` are in seconds; `refused` are answers other than 2xx and 3xx."""

    requests: int
    seconds: float
    p50: float
    p99: float
    refused: int
    broken: int

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return (self.requests - self.refused) / self.seconds


def require_wrk() -> str:
    """Return wrk's path, or end with how to install it."""
    path = shutil.which("wrk")
    if path is None:
        raise SystemExit(
            "wrk is missing. Debian, Ubuntu: apt install wrk; macOS: brew install wrk; source: github.com/wg/wrk"
        )
    return path


def load(
    url: str, connections: int, seconds: float, *, body: bytes | Path = b"3", content_type: str = "application/json",
    headers: Mapping[str, str] | None = None, bodies: Path | None = None,
) -> Load:  # fmt: skip
    """Send `body`, or by turns the lines of the file `bodies`, over `connections` for `seconds`. Raises RuntimeError when nothing was answered."""
    lines = "\n".join(f"{name}: {value}" for name, value in (headers or {}).items())
    env = {**os.environ, "BENCH_CONTENT_TYPE": content_type, "BENCH_HEADERS": lines}
    if bodies is not None:
        env["BENCH_BODIES_FILE"] = str(bodies)
    elif isinstance(body, Path):
        env["BENCH_BODY_FILE"] = str(body)
    else:
        env["BENCH_BODY"] = body.decode()
    command = [require_wrk(), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
    done = subprocess.run(
        [*command, "-s", str(SCRIPT), url], env=env, capture_output=True, text=True, timeout=seconds + 60, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError(f"wrk failed at {url}: {done.stdout}{done.stderr}")
    result = Load(**json.loads(found[0].removeprefix("RESULT ")))
    if result.requests == result.refused:
        raise RuntimeError(f"{url} answered nothing well: {result}")
    return result
