"""`make quick` runs the tests of what has changed, the likeliest to fail first."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quick", ROOT / ".ci" / "quick.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_module_has_the_tests_that_mirror_it_then_those_that_import_it(quick: ModuleType) -> None:
    first, *others = quick.chosen_for(["src/weir/wire/sse.py"], most=3)
    assert first == "tests/wire/test_sse.py" and len(others) == 3
    through_a_helper = quick.chosen_for(["tests/batching/mill.py"], most=30)
    assert "tests/batching/test_bulk.py" in through_a_helper


def test_a_changed_test_runs_and_of_a_page_its_blocks(quick: ModuleType) -> None:
    assert quick.chosen_for(["tests/test_quick.py", "tests/test_that_is_gone.py", "LICENSE"], most=3) == [
        "tests/test_quick.py"
    ]
    blocks, links = quick.chosen_for(["docs/tutorial.md"], most=3)
    assert blocks == "tests/documentation/test_pages.py::test_page_does_what_it_shows[docs/tutorial.md]"
    assert links == "tests/documentation/test_links.py"
