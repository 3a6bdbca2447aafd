"""The house keeps its order: parts know only those below them, files stay small, imports stay light."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "weir"
MODULES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CORE = ("asyncio", "socket", "threading", "multiprocessing", "time", "random")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
    return found


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    return set(run.stdout.split())


def test_imports_go_one_way() -> None:
    linter = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    run = subprocess.run([*linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_part_is_in_the_contract() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    parts = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    missing = {part for part in parts if not part.startswith("_") and f"weir.{part}" not in config}
    assert not missing


def test_benchmarks_import_no_tests_and_what_make_bench_installs() -> None:
    """On a fresh clone, `make bench` has no tests' libraries. Peers, and what judges them, have environments of their own."""
    apart = {ROOT / "benchmarks" / name for name in ("loadgen", "peers")}
    paths = [path for name in ("benchmarks", "reproduction") for path in (ROOT / name).rglob("*.py")]
    imported = {name.partition(".")[0] for path in paths if apart.isdisjoint(path.parents) for name in imports_of(path)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rules = re.findall(r"^\$\(VENV\)/\.(?:serve|bench):(.+?)touch", (ROOT / "Makefile").read_text(), re.M | re.S)
    extras = [extra for found in re.findall(r"\.\[([a-z,]+)\]", "".join(rules)) for extra in found.split(",")]
    listed = [*project["project"]["dependencies"], *project["dependency-groups"]["bench"]]
    listed += [each for extra in extras for each in project["project"]["optional-dependencies"][extra]]
    installed = {_plain(re.split(r"[^\w.-]", each)[0]) for each in listed}
    known = {name for name, owners in packages_distributions().items() if installed & {*map(_plain, owners)}}
    ours = {"weir", "benchmarks", "reproduction"}
    assert imported - known - ours - sys.stdlib_module_names == {"torch"}  # of what runs where a GPU is


def _plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_modules_stay_under_800_lines() -> None:
    long = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in MODULES + TESTS}
    assert {name: lines for name, lines in long.items() if lines > 800} == {}


SILENCED = re.compile(r"# *(noqa(: ([A-Z]+[0-9]+[, ]*)+)?|type: ignore(\[[a-z, -]+\])?|pragma: no cover)")


def test_what_is_silenced_says_why() -> None:
    """In the same line, or in a comment above it."""
    without = []
    for path in MODULES + TESTS:
        before = ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            mark = SILENCED.search(line)
            said = mark and re.search("[a-z]{2}", SILENCED.sub("", line[mark.start() :]))
            if mark and not said and not before.startswith("#"):
                without.append(f"{path.relative_to(ROOT)}:{number}")
            before = line.strip()
    assert without == []


@pytest.mark.parametrize("part", ["policy", "batching"])
def test_the_core_imports_no_io_no_clock_and_no_randomness(part: str) -> None:
    for path in (SOURCE / part).rglob("*.py"):
        forbidden = {name for name in imports_of(path) if name.partition(".")[0] in CORE}
        assert not forbidden, f"{name_of(path)} imports {', '.join(sorted(forbidden))}"


NEEDED_LATER = {
    "import weir": "asyncio uvicorn starlette pydantic prometheus_client numpy msgspec cloudpickle torch onnxruntime grpc",
    "import weir; weir.Service": "uvicorn starlette numpy",
    "import weir.app": "weir.policy.solve.smdp opentelemetry",
    "import weir.cli; weir.cli.command_line()": "uvicorn starlette uvloop numpy structlog prometheus_client weir.app",
}


@pytest.mark.parametrize("statement", NEEDED_LATER)
def test_what_is_loaded_only_when_it_is_needed(statement: str) -> None:
    assert not loaded_by(statement) & set(NEEDED_LATER[statement].split())


@pytest.mark.parametrize("words", ["--version", "serve nowhere.py:Model --workers 2", "embed serve ./no/where"])
def test_a_command_line_is_read_without_pydantic(words: str) -> None:
    """typer would load it to look at each option, which takes a quarter of a server's start."""
    run = f"sys.argv = {['weir', *words.split()]}\nimport contextlib, weir.cli\nwith contextlib.suppress(SystemExit): weir.cli.main()"
    assert "pydantic" not in loaded_by(run)


def test_only_request_state_writes_the_state_of_a_request() -> None:
    written: dict[str, set[str]] = {}
    for path in MODULES:
        text = path.read_text()
        if not re.search(r"\.(settled|taken|overtaken|partial)\b", text):
            continue  # to parse all that there is takes seconds
        for node in ast.walk(ast.parse(text)):
            for target in [getattr(node, "target", None), *getattr(node, "targets", [])]:
                if isinstance(target, ast.Attribute) and target.attr in {"settled", "taken", "overtaken", "partial"}:
                    written.setdefault(name_of(path), set()).add(target.attr)
    assert written == {"weir.batching.request_state": {"settled", "taken", "overtaken", "partial"}}


@pytest.mark.parametrize("part", ["serving", "tuning", "catalog"])
def test_time_comes_from_the_injected_clock(part: str) -> None:
    """A clock of the interpreter may be the default of a parameter; nobody calls one."""
    clocks = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
    for path in (SOURCE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not clocks & {alias.name for alias in node.names}, f"{name_of(path)} imports a clock by name"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in clocks:
                pytest.fail(f"{name_of(path)}:{node.lineno} calls {ast.unparse(node.func)}")
