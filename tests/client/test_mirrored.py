"""The client that blocks and the one for event loops are one client: the same methods, arguments and words."""

import inspect

from weir.client.methods import AsyncClient, Client


def test_both_have_the_same_methods_which_take_the_same_and_say_so() -> None:
    one, other = ({name: each for name, each in vars(kind).items() if name[0] != "_"} for kind in (Client, AsyncClient))
    assert one.keys() == other.keys()
    for name, awaited in other.items():
        assert inspect.signature(one[name]).parameters == inspect.signature(awaited).parameters
        assert inspect.iscoroutinefunction(awaited) or inspect.isasyncgenfunction(awaited)
        # Who awaits can withdraw what others still do; threads cannot.
        assert name == "infer_ordered" or inspect.getdoc(one[name]) == inspect.getdoc(awaited)
