"""The client that blocks and the one for event loops are one client: the same methods, arguments and words."""

import inspect

from tests.rings import subcases

from weir.client.methods import AsyncClient, Client

METHODS = sorted(name for name in vars(Client) if not name.startswith("_"))
# Who awaits can withdraw what others still do; threads cannot.
WORDS_OF_THEIR_OWN = {"infer_ordered"}


def test_both_have_the_same_methods() -> None:
    assert sorted(name for name in vars(AsyncClient) if not name.startswith("_")) == METHODS


@subcases("name", METHODS)
def test_both_take_the_same_and_say_so(name: str) -> None:
    one, other = getattr(Client, name), getattr(AsyncClient, name)
    assert inspect.signature(one).parameters == inspect.signature(other).parameters
    assert inspect.iscoroutinefunction(other) or inspect.isasyncgenfunction(other)
    if name not in WORDS_OF_THEIR_OWN:
        assert inspect.getdoc(one) == inspect.getdoc(other)
