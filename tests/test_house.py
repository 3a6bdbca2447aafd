"""The tool that counts the house counts right."""

import re
from functools import cache
from pathlib import Path

import pytest
from tests.house import SOURCE, Module, circles, code_lines, read_modules, repeated_classes, show


def folder(at: Path, files: dict[str, str]) -> Path:
    source = at / "lodge"
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = '"""Doc\n\nstring."""\n\n# comment\nx = """two\nlines"""\n\n\ndef f() -> None:\n    """Doc."""\n    y = (\n        1,  # one\n\n    )\n'

    assert code_lines(source) == 6  # x twice, def, and the three lines of y that are not blank


def test_circles_are_found_also_by_way_of_others(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a.py": "from lodge import b\n",
        "b.py": "try:\n    import lodge.room.c\nexcept ImportError:\n    pass\n",
        "room/__init__.py": "",
        "room/c.py": "from ..a import x\n",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lodge import e\n",
        "e.py": "from lodge import d\n\n\ndef late() -> None:\n    import lodge.a\n",
    }

    modules = read_modules(folder(tmp_path, files))
    assert circles(modules) == [["lodge.a", "lodge.b", "lodge.room.c"]]
    assert circles(modules, strict=True) == [["lodge.a", "lodge.b", "lodge.room.c"], ["lodge.d", "lodge.e"]]


def test_rooms_and_repeated_classes(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "a.py": "class A: ...\n",
        "room/__init__.py": "X = 1\n",
        "room/b.py": "class A: ...\nclass B: ...\n",
    }
    modules = read_modules(folder(tmp_path, files))

    assert [(module.name, module.room, module.lines) for module in modules] == [
        ("lodge", "weir", 0), ("lodge.a", "weir", 1), ("lodge.room", "room", 1), ("lodge.room.b", "room", 2),
    ]  # fmt: skip
    assert repeated_classes(modules) == {"A": ["lodge.a", "lodge.room.b"]}


@cache
def our_modules() -> list[Module]:
    return read_modules()


def test_our_own_house_has_no_circles_and_no_name_twice(capsys: pytest.CaptureFixture[str]) -> None:
    modules = our_modules()
    assert circles(modules) == []
    assert repeated_classes(modules) == {}, "a class of this name is elsewhere already"

    show(modules)

    printed = capsys.readouterr().out
    assert f"{sum(module.lines for module in modules):,}" in printed
    assert "\ncircle:" not in printed


def test_our_own_house_has_no_knots() -> None:
    """No circle has more than two files, if imports in functions and for type checking count, too."""
    assert [circle for circle in circles(our_modules(), strict=True) if len(circle) > 2] == []


# The whole of the source and of the tests: modules and code lines. A commit may lower these numbers. One that adds a capability may raise
# them by at most four fifths of its own size, and says so in CHANGELOG.md.
MODULES = 283
SOURCE_LINES = 67_246
TEST_LINES = 72_708


def test_our_own_house_keeps_its_size() -> None:
    modules = our_modules()
    tests = sum(code_lines(path.read_text()) for path in Path(__file__).parent.rglob("*.py"))
    found = {"MODULES": len(modules), "SOURCE_LINES": sum(module.lines for module in modules), "TEST_LINES": tests}
    limits = {"MODULES": MODULES, "SOURCE_LINES": SOURCE_LINES, "TEST_LINES": TEST_LINES}
    grown = [
        f"{name}: {found[name]:,}; the limit is {limit:,}" for name, limit in limits.items() if found[name] > limit
    ]
    assert not grown, "\n".join([*grown, HOW_TO_GROW])


def test_names_of_tests_have_at_most_70_characters() -> None:
    named = re.compile(r"def (test_\w{66,})")
    assert [name for path in Path(__file__).parent.rglob("*.py") for name in named.findall(path.read_text())] == []


MOST_LAID_OUT_BY_HAND = 119


def test_layouts_by_hand_become_fewer() -> None:
    """They are for tables. Of calls and signatures with many arguments, the formatter puts each on a line of its own: pass a value object instead."""
    marks = sum(path.read_text().count("# fmt: skip") for path in SOURCE.rglob("*.py"))
    assert marks <= MOST_LAID_OUT_BY_HAND


FLAGS = "each parameter is a flag of the command"
KEYWORDS = "each parameter is a keyword that users write"
OTHERS = "the signature is that of another program, whose callers come unchanged"
MOST_PARAMETERS = 8
# The signatures with more parameters, and why they have no value object instead.
LONG_SIGNATURES = {
    "weir.catalog.adapters.triton_utils.PbRequest.__init__": OTHERS,
    "weir.client.embedding.EmbeddingClient.__init__": OTHERS,
    "weir.client.embedding.EmbeddingClient.encode": OTHERS,
    "weir.commands.embed.benchmark": FLAGS,
    "weir.serving.service.Service.__init__": KEYWORDS,
    "weir.simulation.banks.solve": KEYWORDS,
    "weir.simulation.scaling.simulate_scaling": KEYWORDS,
    "weir.simulation.simulator.run": KEYWORDS,
    "weir.simulation.simulator.simulate": KEYWORDS,
}


def test_signatures_with_many_parameters_become_fewer() -> None:
    long = {name for module in our_modules() for name, count in module.parameters.items() if count > MOST_PARAMETERS}
    assert long - set(LONG_SIGNATURES) == set(), "pass a value object"
    assert set(LONG_SIGNATURES) - long == set(), "shorter now: leave it out of LONG_SIGNATURES"


def test_parameters_are_counted_without_self_and_with_what_is_nested(tmp_path: Path) -> None:
    text = "class A:\n    def m(self, a, /, b, *rest, c, **more): ...\n    class B:\n        async def n(cls): ...\ndef f(x):\n    def g(y, z): ...\n"
    (module,) = read_modules(folder(tmp_path, {"a.py": text}))
    assert module.parameters == {"lodge.a.A.m": 3, "lodge.a.A.B.n": 0, "lodge.a.f": 1, "lodge.a.f.g": 2}


HOW_TO_GROW = """The house has grown. Blank lines, comments and docstrings do not count.
- Look for code to share or to remove first: the total is there to make you look.
- If your change adds a capability, raise the total in tests/test_house.py by at most four fifths of its size, with a line in CHANGELOG.md."""


def test_no_file_has_the_marks_of_a_conflict() -> None:
    root = SOURCE.parents[1]
    folders = ("src", "tests", "docs", "benchmarks", "reproduction", "examples", "deploy", ".ci", ".github")
    files = [
        path for folder in folders for path in (root / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    files += [path for path in root.iterdir() if path.is_file()]
    marks = re.compile(rb"^(<{7} |>{7} )", re.MULTILINE)
    assert [path.name for path in files if marks.search(path.read_bytes())] == []
