"""Count the house: files, code lines, tiny modules and import circles, room by room.

    python -m tests.house

A code line is a line that is not blank, a comment or a docstring. A module is tiny when it has fewer than TINY code lines.
A circle is a set of modules that import each other at module level; imports for type checking alone do not count. In the
strict sense they do, and so do imports in functions.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "weir"
TINY = 60


@dataclass(frozen=True)
class Module:
    """One file: its dotted `name`, the `package` that it stands in or is, its number of code `lines`, what it `imports` at module level, what it
    `knows` as it is imported anywhere in the file, its `classes`, and how many `parameters` its functions have, without self and cls."""

    name: str
    package: str
    lines: int
    imports: frozenset[str]
    knows: frozenset[str]
    classes: tuple[str, ...]
    parameters: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def room(self) -> str:
        """The part of the house that it stands in; modules directly under weir stand in "weir"."""
        parts = self.package.split(".")
        return parts[1] if len(parts) > 1 else "weir"


def code_lines(source: str, tree: ast.Module | None = None) -> int:
    """Return how many lines of `source` are code; `tree` is what it is parsed to, if that is known."""
    tree = tree or ast.parse(source)
    docstrings = _lines_of(
        node.body[0]
        for node in (tree, *_statements(tree.body))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    )
    texts = {number: text.strip() for number, text in enumerate(source.split("\n"), 1) if number not in docstrings}
    lines = {number for number, text in texts.items() if text and text[0] != "#"}
    if any(mark in text or text.endswith("\\") for text in texts.values() for mark in ('"""', "'''")):
        constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr))
        lines |= _lines_of(constants) - docstrings  # of a text of several lines, each counts
    return len(lines)


def _lines_of(nodes: Iterable[ast.expr | ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield these statements and all within them: to walk through their expressions, too, takes longer than to parse them."""
    for node in body:
        yield node
        yield from _statements(_blocks(node))


def _blocks(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements in the blocks of a statement."""
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(node, name, ())
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from part.body


def _at_module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If):
            todo += node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node.body + node.orelse
        elif isinstance(node, ast.Try):
            todo += (
                node.body + node.orelse + node.finalbody + [line for handler in node.handlers for line in handler.body]
            )


def _imported(nodes: Iterable[ast.AST], package: str) -> frozenset[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _parameters(body: Iterable[ast.stmt], name: str) -> Iterator[tuple[str, int]]:
    """Yield the full name of each function in `body`, which is that of `name`, and the number of its parameters."""
    for inner in body:
        if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _parameters(_blocks(inner), name)
            continue
        own = f"{name}.{inner.name}"
        if not isinstance(inner, ast.ClassDef):
            given = inner.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield own, len([each for each in names if each not in ("self", "cls")])
        yield from _parameters(inner.body, own)


def read_modules(source: Path = SOURCE) -> list[Module]:
    """Return the modules under `source`, a package's folder, by name."""
    modules = []
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        dotted = ".".join(path.relative_to(source.parent).with_suffix("").parts)
        name = dotted.removesuffix(".__init__")
        package = name if dotted != name else name.rpartition(".")[0]
        classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        imports, knows = _imported(_at_module_level(tree), package), _imported(_statements(tree.body), package)
        parameters = dict(_parameters(tree.body, name))
        modules.append(Module(name, package, code_lines(text, tree), imports, knows, classes, parameters))
    return modules


def circles(modules: list[Module], *, strict: bool = False) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or by way of others (Tarjan 1972). Without `strict`, only imports at module
    level count; with it, packages do not: that they load public names late when these are asked for makes no circle."""
    names = {module.name for module in modules}
    graph = {
        module.name: sorted(((module.knows if strict else module.imports) & names) - {module.name})
        for module in modules
    }
    if strict:
        graph = {
            name: [] if any(each.startswith(f"{name}.") for each in names) else others for name, others in graph.items()
        }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            circle = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(found)


def repeated_classes(modules: list[Module]) -> dict[str, list[str]]:
    """Return the class names that more than one module has, each with its modules."""
    where: dict[str, list[str]] = {}
    for module in modules:
        for name in module.classes:
            where.setdefault(name, []).append(module.name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def show(modules: list[Module]) -> None:
    """Print the counts of `modules`."""
    from rich.console import Console
    from rich.table import Table

    table = Table("room", "files", "code lines", f"under {TINY}")
    rooms = Counter(module.room for module in modules)
    for room in sorted(rooms, key=lambda room: -sum(module.lines for module in modules if module.room == room)):
        inside = [module for module in modules if module.room == room]
        table.add_row(
            room, str(len(inside)), f"{sum(m.lines for m in inside):,}", str(sum(0 < m.lines < TINY for m in inside))
        )
    table.add_section()
    total = sum(module.lines for module in modules)
    table.add_row("all", str(len(modules)), f"{total:,}", str(sum(0 < module.lines < TINY for module in modules)))
    console = Console()
    console.print(table)
    for circle in circles(modules):
        console.print("circle:", ", ".join(circle))
    for circle in circles(modules, strict=True):
        console.print("strict circle:", ", ".join(circle))
    for name, places in repeated_classes(modules).items():
        console.print(f"class {name}:", ", ".join(places))


if __name__ == "__main__":
    show(read_modules())
