"""Reads a page of the documentation and does what it shows.

- A `python` block is run, all blocks of a page in one namespace, `await` allowed. If its first line is a comment with a
  file name, it is written to that file instead (and so is a `toml` block): models to serve, programs to start.
- A `console` block is what a terminal shows: each line after "$ " is run, and what it prints must be what follows; "..."
  stands for anything. `weir serve` or `weir embed serve` that shows nothing runs in the background, on a free port that takes the place of 8000 from then on, until
  the page ends or serves again. One `weir embed serve` without options is asked by all pages that show it: to load its model takes seconds. What ends by itself (HERE), or is refused before it starts, is run in this process: to start Python and
  load numpy, scipy and matplotlib takes longer.
- `sh` and all other blocks are only shown; so is a block after a line `<!-- not run: REASON -->`, and one after `<!-- with ray: REASON -->` where Ray is not
  installed.
"""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.served import in_shell, start_weir, weir_here

from weir.workers import source

ROOT = Path(__file__).resolve().parents[2]
PATH = [str(ROOT / "src"), str(ROOT)]  # where pages find modules that they do not write
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([\w/.-]+\.(?:py|toml))\n")
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*\Z")
WITH_RAY = re.compile(r"<!-- with ray: .+ -->\s*\Z")
COMMAND = re.compile(r"^\$ ", re.MULTILINE)
HERE = re.compile(
    r"(?P<command>weir (--help|batch|bench|check|embed|profile|serve|simulate|solve)\b[^|&;<>$`]*)(> (?P<file>[\w.-]+))?"
)


class Block(NamedTuple):
    """One fenced block, and the line of the page where it starts."""

    language: str
    text: str
    line: int
    shown_only: bool


def all_pages() -> list[Path]:
    """Return the README and every page of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            found["language"], textwrap.dedent(found["text"]), text.count("\n", 0, found.start()) + 1,
            NOT_RUN.search(text, 0, found.start()) is not None
            or (WITH_RAY.search(text, 0, found.start()) is not None and find_spec("ray") is None),
        )
        for found in FENCE.finditer(text)
    ]  # fmt: skip


def table(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading that begins so, its heads first."""
    lines = text.partition(f"\n## {heading}")[2].partition("\n## ")[0].splitlines()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines if line.startswith("|") and set(line) - set("|:- ")
    ]  # fmt: skip


class Server(NamedTuple):
    """A running server, and its port."""

    process: subprocess.Popen[str]
    port: str

    def end(self) -> None:
        """End it, as a person does with Ctrl-C; it must say that all went well."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.stderr is not None
        last = self.process.stderr.read()
        self.process.stderr.close()
        assert self.process.wait() == 0, last


# The commands whose server may go on when a page ends, since pages only ask it for what depends on nothing before.
SHARED = ("weir embed serve",)


def do(page: Path, folder: Path, shared: dict[str, Server]) -> None:
    """Do what `page` shows, with `folder` as the working directory. `shared` has the servers of SHARED that pages have started, for the
    caller to end."""
    with contextlib.chdir(folder), _on_path(folder), contextlib.closing(_Terminal(folder, shared)) as terminal:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in read_blocks(page):
            if block.shown_only:
                continue
            if block.language in ("python", "toml") and (name := FILE_NAME.match(block.text)):
                (folder / name[1]).write_text(block.text)
                if name[1].endswith(".py"):
                    _forget_others(folder / name[1])
            elif block.language == "python":
                run_python(block, page, namespace)
            elif block.language == "console":
                terminal.do(block.text)


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let the page import the files it has written; forget them afterwards."""
    sys.path.insert(0, str(folder))
    known = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def _forget_others(file: Path) -> None:
    """Let the page import `file`, also if another test has imported a module of that name."""
    claimed = source._claimed.get(file.stem)
    if claimed is not None and claimed.path != str(file.parent):
        source.forget(claimed)  # a model that another test loaded in this process
    module = sys.modules.get(file.stem)
    if module is not None and not str(getattr(module, "__file__", "")).startswith(str(file.parent)):
        del sys.modules[file.stem]


def run_python(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Run a block, with `await` where the page has it. Lines in tracebacks are those of the page."""
    text = "\n" * block.line + block.text
    code = compile(text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))  # noqa: S307 - our own pages
    else:
        exec(code, namespace)  # noqa: S102 - our own pages


def ask(block: Block, url: str, folder: Path) -> None:
    """Run the commands of a `console` block against the server at `url`."""
    with contextlib.closing(_Terminal(folder, {}, port=url.rpartition(":")[2])) as terminal:
        terminal.do(block.text)


class _Terminal:
    """Runs the commands of `console` blocks."""

    def __init__(self, folder: Path, shared: dict[str, Server], port: str = "8000") -> None:
        self._folder = folder
        self._shared = shared
        self._own: Server | None = None
        self._port = port
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "COLUMNS": "100", "NO_COLOR": "1"}
        # To measure a model takes seconds, and what is kept of it belongs to no page.
        self._environment |= {"WEIR_CALIBRATE": "false", "WEIR_CACHE": str(folder / ".cache")}

    def do(self, text: str) -> None:
        """Run each command; compare what it prints."""
        for part in COMMAND.split(text)[1:]:
            lines = part.replace("\\\n", " ").splitlines()
            command, expected = lines[0], "\n".join(lines[1:])
            if command.startswith(("weir serve ", "weir embed serve")) and not expected:
                self._serve(command)
            else:
                self._run(command, expected)

    def close(self) -> None:
        """End the server that the page has started for itself."""
        if self._own is not None:
            server, self._own = self._own, None
            server.end()

    def _serve(self, command: str) -> None:
        self.close()
        server = self._shared.get(command) or self._start(command)
        self._port = server.port
        if command in SHARED:
            self._shared[command] = server
        else:
            self._own = server

    def _start(self, command: str) -> Server:
        words = [*shlex.split(command)[1:], "--log-format", "json", "--log-level", "info"]
        if "--uds" not in words:
            words += ["--port", "0"]
        process = start_weir(words, self._environment, self._folder, stdout=subprocess.DEVNULL)
        return Server(process, self._port_when_ready(process))

    def _port_when_ready(self, server: subprocess.Popen[str]) -> str:
        said = []
        port = self._port
        for line in server.stderr or ():
            said.append(line)
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "listening":
                port = (re.findall(r":(\d+)", event["address"]) or [port])[0]
            if event.get("event") == "ready":
                return port
        raise AssertionError("weir serve did not become ready:\n" + "".join(said))

    def _run(self, command: str, expected: str) -> None:
        if here := HERE.fullmatch(command):
            words = shlex.split(here["command"].replace("localhost:8000", f"127.0.0.1:{self._port}"))
            done = weir_here(*words[1:], env=self._environment, cwd=self._folder)
            if here["file"]:
                (self._folder / here["file"]).write_text(done.stdout)
                done.stdout = ""
        else:
            done = self._run_in_shell(command)
        printed = (done.stdout + done.stderr).replace("\r\n", "\n").replace(f"127.0.0.1:{self._port}", "localhost:8000")
        assert matches(printed, expected), f"$ {command}\nprinted:\n{printed}\nbut the page shows:\n{expected}"

    def _run_in_shell(self, command: str) -> subprocess.CompletedProcess[str]:
        line = re.sub(r"\bcurl ", "curl -sS ", command).replace("localhost:8000", f"127.0.0.1:{self._port}")
        line = re.sub(r"^weir ", shlex.join(_weir()) + " ", line)
        line = re.sub(r"^python ", shlex.quote(sys.executable) + " ", line)
        return in_shell(line, cwd=self._folder, env=self._environment)


def matches(printed: str, expected: str) -> bool:
    """Return whether `printed` is what the page shows, "..." standing for anything."""
    pattern = r"[\s\S]*".join(re.escape(part.strip()) for part in expected.split("..."))
    return re.fullmatch(rf"\s*{pattern}\s*", printed) is not None


def _weir() -> list[str]:
    return [sys.executable, "-m", "weir"]
