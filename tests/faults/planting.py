"""Plants faults: what a function does wrong, named by the function and the behaviour, so that an edit elsewhere in it changes nothing.

A fault replaces one attribute of a module as the module is imported: by another value, or by the function made again without a
call, an assignment or a condition. See known.py and tests/simulated/mutants.py for the faults.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# Changes the definition of a function, and returns in how many places.
Edit = Callable[[ast.AST], int]


class Fault(NamedTuple):
    """`where` is MODULE:ATTRIBUTE, such as `weir.wire.sse:EventParser.feed`. An `edit` changes the function; `value` makes a new
    value of the old one."""

    where: str
    edit: Edit | None = None
    value: Callable[[Any], Any] | None = None

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.where.partition(":")[0]


class _Rewriter(ast.NodeTransformer):
    def __init__(self, change: Callable[[ast.AST], ast.AST | None]) -> None:
        self._change = change
        self.count = 0

    def visit(self, node: ast.AST) -> Any:
        new = self._change(node)
        if new is None:
            return self.generic_visit(node)
        self.count += 1
        return ast.copy_location(new, node)


def _edit(change: Callable[[ast.AST], ast.AST | None]) -> Edit:
    def apply(definition: ast.AST) -> int:
        rewriter = _Rewriter(change)
        rewriter.generic_visit(definition)
        return rewriter.count

    return apply


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_read(node: ast.AST, kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> bool:
    return isinstance(node, kind) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def skips(name: str, result: str = "None") -> Edit:
    """The function does not call `name`, a dotted name or the last part of one, and goes on with `result`."""

    def change(node: ast.AST) -> ast.AST | None:
        called = node.value if isinstance(node, ast.Await) else node
        is_it = isinstance(called, ast.Call) and name in (ast.unparse(called.func), _last_name(called.func))
        return _expression(result) if is_it else None

    return _edit(change)


def forgets(target: str) -> Edit:
    """The function does not assign to `target`; it assigns to other targets of the same value."""

    def change(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Assign):
            left = [each for each in node.targets if ast.unparse(each) != target]
            if len(left) == len(node.targets):
                return None
            return ast.Assign(left, node.value) if left else ast.Pass()
        is_it = isinstance(node, (ast.AugAssign, ast.AnnAssign)) and ast.unparse(node.target) == target
        return ast.Pass() if is_it else None

    return _edit(change)


def takes(condition: str, value: str) -> Edit:
    """The function takes the `condition` for `value`: each test, or part of a test, that is it, or all tests that mention such a name."""
    normal = ast.unparse(_expression(condition))
    is_name = normal.isidentifier()

    def change(node: ast.AST) -> ast.AST | None:
        if is_name:
            test = getattr(node, "test", None)
            if isinstance(node, (ast.If, ast.While, ast.IfExp)) and any(
                _last_name(each) == normal for each in ast.walk(test or node)
            ):
                node.test = _expression(value)
                return node
            return None
        is_it = _is_read(node, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Call, ast.Attribute))
        return _expression(value) if is_it and ast.unparse(node) == normal else None

    return _edit(change)


def mistakes(name: str, other: str) -> Edit:
    """The function uses `other` where it should use `name`: a name, an attribute's value or a constant."""
    normal = ast.unparse(_expression(name))

    def change(node: ast.AST) -> ast.AST | None:
        return _expression(other) if _is_read(node, ast.expr) and ast.unparse(node) == normal else None

    return _edit(change)


_NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt
}  # fmt: skip


def off_by_one(name: str) -> Edit:
    """Where the function compares `name`, a limit that should be included is not, or the other way round."""

    def change(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Compare) or name not in map(_last_name, ast.walk(node)):
            return None
        node.ops = [_NEIGHBOURS.get(type(each), type(each))() for each in node.ops]
        return node

    return _edit(change)


def gives(result: Any = None) -> Callable[[Any], Any]:
    """The function does nothing, and returns `result`."""
    return lambda _: lambda *_, **__: result


def edited(fault: Fault) -> ast.Module:
    """Return the module of `fault` with its function changed. Raises ValueError if there is no such function, or nothing in it to change."""
    path = Path(__file__).parents[2].joinpath("src", *fault.module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    body: Sequence[ast.stmt] = tree.body
    found: Any = None
    for name in fault.where.partition(":")[2].split("."):
        found = next((each for each in reversed(body) if getattr(each, "name", "") == name), None)
        body = getattr(found, "body", ())
    if found is None or fault.edit is None or not fault.edit(found):
        raise ValueError(f"{fault.where}: is not there, or does not do what the fault would take away")
    return ast.fix_missing_locations(tree)


def _replace(module: ModuleType, fault: Fault) -> None:
    *path, name = fault.where.partition(":")[2].split(".")
    owner: Any = module
    for each in path:
        owner = getattr(owner, each)
    assert fault.value is not None
    setattr(owner, name, fault.value(getattr(owner, name)))


class _Finder:
    """Runs one module with its fault."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module = self._exec  # type: ignore[method-assign]  # one loader, of one module
        return spec

    def _exec(self, module: ModuleType) -> None:
        assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
        if self._fault.edit is None:
            importlib.machinery.SourceFileLoader.exec_module(module.__loader__, module)
            _replace(module, self._fault)
        else:
            code = compile(edited(self._fault), str(module.__file__), "exec")
            exec(code, module.__dict__)  # noqa: S102  # the module's own code


def plant(fault: Fault) -> None:
    """Have this process import the module of `fault` with it."""
    if fault.module in sys.modules:
        raise RuntimeError(f"{fault.module} has been imported already")
    sys.meta_path.insert(0, _Finder(fault))
