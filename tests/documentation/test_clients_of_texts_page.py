"""The table of clients and calls: each cell is a call that the client's test makes, and each test has a row."""

import ast
import re

from tests.documentation.pages import ROOT, table
from tests.rings import subcases

PAGE = ROOT / "docs" / "how-to" / "use-embedding-clients.md"
TESTS = ROOT / "tests" / "text_server" / "clients" / "test_stock_clients.py"
OTHERS = {"the_page_shows_how"}  # no client's


def called() -> dict[str, set[str]]:
    """Return what each test calls, as it stands there, by the name of the test."""
    found = {}
    for each in ast.parse(TESTS.read_text()).body:
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
            calls = {ast.unparse(node.func) for node in ast.walk(each) if isinstance(node, ast.Call)}
            found[each.name.removeprefix("test_")] = calls
    return found


FOUND = [re.findall(r"`(.+?)`", " ".join(row)) for row in table(PAGE.read_text(), "Clients and calls")]
ROWS, CALLED = {client: calls for client, *calls in filter(None, FOUND)}, called()


def test_every_test_of_a_client_has_a_row() -> None:
    assert sorted(each.partition("_with_")[0] for each in CALLED.keys() - OTHERS) == sorted(ROWS)


@subcases("client", ROWS)
def test_each_cell_is_called(client: str) -> None:
    (made,) = (calls for name, calls in CALLED.items() if name.partition("_with_")[0] == client)
    assert ROWS[client]
    for call in ROWS[client]:
        assert any(each == call or each.endswith(f".{call}") for each in made), f"{client}: {call} is not called"
