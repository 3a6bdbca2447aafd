"""Runs the tests of what has changed: `python .ci/quick.py [--since COMMIT] [--list] [PYTEST ARGUMENTS]`, as `make quick` does.

What has changed is what git says of the working tree against COMMIT, by default the last commit that main has. A changed test file runs; of a changed
module those that mirror it, then those that import it, the fewest imports first, up to --most files; of a page its blocks. It is for the desk: `make test` decides.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


def changed_files(since: str) -> list[str]:
    """Return the paths that differ from the commit `since`, and those that git does not know."""
    commands = (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"])
    return [line for command in commands for line in _git(*command).splitlines()]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the names of the modules that a file imports; of `from a import b`, both `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{each.name}" for each in node.names)])
    return frozenset(found)


def chosen_for(changed: Iterable[str], most: int) -> list[str]:
    """Return what to give to pytest for these changed paths, the likeliest to fail first; of files that only import them, at most `most`."""
    imports = {path: imports_of(path) for path in sorted(TESTS.rglob("*.py"))}
    chosen: dict[str, None] = {}
    importing: dict[Path, int] = {}
    for name in changed:
        path = ROOT / name
        if path.name.startswith("test_") and path.is_relative_to(TESTS) and path.exists():
            chosen[name] = None
        elif path.suffix == ".md" and path.is_relative_to(ROOT / "docs"):
            chosen[f"tests/documentation/test_pages.py::test_page_does_what_it_shows[{name}]"] = None
            chosen["tests/documentation/test_links.py"] = None
        elif path.suffix == ".py":
            module = ".".join(Path(name.removeprefix("src/")).with_suffix("").parts).removesuffix(".__init__")
            mirrored = TESTS.joinpath(*module.split(".")[1:-1]).glob(f"test_{path.stem}*.py")
            chosen.update(dict.fromkeys(str(each.relative_to(ROOT)) for each in sorted(mirrored)))
            users = _users(module, imports)
            importing.update({each: len(imports[each]) for each in users if each.name.startswith("test_")})
    shortest = sorted(importing, key=lambda each: importing[each])
    others = [str(each.relative_to(ROOT)) for each in shortest]
    return [*chosen, *[each for each in others if each not in chosen][:most]]


def _users(module: str, imports: dict[Path, frozenset[str]]) -> set[Path]:
    """Return the files that import `module`, or a helper of the tests that does."""
    users: set[Path] = set()
    wanted = {module}
    while wanted:
        new = {path for path, names in imports.items() if names & wanted} - users
        users |= new
        wanted = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in new if "test_" not in path.name}
    return users


def main() -> int:
    """Choose and run; return pytest's exit code."""
    parser = argparse.ArgumentParser(prog="quick.py", description=__doc__)
    parser.add_argument("--since", help="the commit to compare with; by default where this branch left main")
    parser.add_argument("--most", type=int, default=10, help="of the files that import what has changed")
    parser.add_argument("--list", action="store_true", help="say which, and run nothing")
    chosen, more = parser.parse_known_args()
    chosen_tests = chosen_for(changed_files(chosen.since or _git("merge-base", "HEAD", "main").strip()), chosen.most)
    print("\n".join(chosen_tests) or "nothing that has changed has tests", flush=True)
    if chosen.list or not chosen_tests:
        return 0
    nightly = ["-m", "nightly or not (soak or browser or torch or sklearn or ray or clients or adapters)"]
    pages = nightly if any("test_pages" in each for each in chosen_tests) else []
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *pages, *chosen_tests, *more], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
