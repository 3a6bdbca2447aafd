from typing import Any

import pytest
from tests.rings import subcases

from weir.config import from_text, from_texts, from_toml
from weir.errors import SettingsError

ENV = list[dict[str, str]]


@subcases(
    ("hint", "texts", "value"),
    [
        (int, ["64"], 64),
        (int | None, ["2"], 2),
        (float, ["0.1"], 0.1),
        (float | None, ["5"], 5.0),
        (bool, ["true"], True),
        (bool, ["False"], False),
        (bool, ["0"], False),
        (str, ["json"], "json"),
        (str | None, ["null"], "null"),
        (Any, ["control-limit:8"], "control-limit:8"),
        (list[str], ["/a", "/b"], ["/a", "/b"]),
        (list[list[int]], ["0,1", "4-6,9"], [[0, 1], [4, 5, 6, 9]]),
        (list[int], ["1,2,4-6", "64"], [1, 2, 4, 5, 6, 64]),
        (list[int], ["-4,-3", "-1"], [-4, -3, -1]),
        (dict[str, Any], ["n=3", "name=bert", "deep=[1, 2]", "empty=", "eq=a=b"],
         {"n": 3, "name": "bert", "deep": [1, 2], "empty": "", "eq": "a=b"}),
        (ENV, ["CUDA_VISIBLE_DEVICES=0,1"], [{"CUDA_VISIBLE_DEVICES": "0,1"}]),
        (ENV, ["A=1", "B=2"], [{"A": "1", "B": "2"}]),
        (ENV, ["A=1", "A=2", "B=3"], [{"A": "1", "B": "3"}, {"A": "2", "B": "3"}]),
    ],
)  # fmt: skip
def test_flags(hint: Any, texts: list[str], value: Any) -> None:
    parsed = from_texts(hint, texts, "--flag")
    assert parsed == value and type(parsed) is type(value)


@subcases(
    ("hint", "texts", "message"),
    [
        (int, ["two"], "--flag='two': must be a whole number"),
        (int | None, ["2.5"], "--flag='2.5': must be a whole number"),
        (float, ["5ms"], "--flag='5ms': must be a number"),
        (float, ["nan"], "--flag=nan: must be finite"),
        (float | None, ["inf"], "--flag=inf: must be finite"),
        (bool, ["perhaps"], "--flag='perhaps': must be true or false"),
        (str, ["a", "b"], "--flag: given 2 times (a, b); must be given once"),
        (list[list[int]], ["0,x"], "--flag='0,x': must be whole numbers and ranges like 0,1,4-7"),
        (list[list[int]], ["1--2"], "--flag='1--2': must be whole numbers"),
        (dict[str, Any], ["n"], "--flag='n': must be KEY=VALUE"),
        (dict[str, Any], ["=3"], "--flag='=3': must be KEY=VALUE"),
        (dict[str, Any], ["n=1", "n=1"], "'n' is given twice; must be given once"),
        (ENV, ["A"], "--flag='A': must be KEY=VALUE"),
    ],
)
def test_wrong_flags(hint: Any, texts: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_texts(hint, texts, "--flag")
    assert message in str(caught.value)


@subcases(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (list[str], "/a /b", ["/a", "/b"]),
        (list[str], '["/with space"]', ["/with space"]),
        (list[list[int]], "0,1 2-3", [[0, 1], [2, 3]]),
        (list[list[int]], "[0, 1]", [[0, 1]]),
        (dict[str, Any], "n=3 name=bert", {"n": 3, "name": "bert"}),
        (dict[str, Any], '{"n": 3}', {"n": 3}),
        (ENV, "A=1 A=2", [{"A": "1"}, {"A": "2"}]),
        (ENV, '{"A": "1"}', [{"A": "1"}]),
    ],
)
def test_variables(hint: Any, text: str, value: Any) -> None:
    assert from_text(hint, text, "WEIR_X") == value


def test_a_variable_that_starts_like_json_must_be_json() -> None:
    with pytest.raises(SettingsError, match=r"WEIR_X='\[1,': must be JSON"):
        from_text(list[str], "[1,", "WEIR_X")


@subcases(
    ("hint", "given", "value"),
    [
        (float, 3, 3.0),
        (list[str], "/a", ["/a"]),
        (list[list[int]], [0, 1], [[0, 1]]),
        (list[list[int]], [[0], [1]], [[0], [1]]),
        (list[list[int]], [], []),
        (ENV, {"A": "1"}, [{"A": "1"}]),
        (ENV, [{"A": "1"}, {"A": "2"}], [{"A": "1"}, {"A": "2"}]),
    ],
)
def test_toml(hint: Any, given: Any, value: Any) -> None:
    parsed = from_toml(hint, given, "weir.toml: key")
    assert parsed == value and type(parsed) is type(value)


@subcases(
    ("hint", "given", "message"),
    [
        (int, "3", "weir.toml: key='3': must be a whole number"),
        (int, True, "weir.toml: key=True: must be a whole number"),
        (float, float("inf"), "weir.toml: key=inf: must be finite"),
        (list[str], [1], "must be a list, each element text"),
        (ENV, [{"A": 1}], "must be a list, each element a table"),
        (dict[str, Any], 3, "must be a table"),
    ],
)
def test_wrong_toml(hint: Any, given: Any, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_toml(hint, given, "weir.toml: key")
    assert message in str(caught.value)
