import pytest

from weir import SettingsError
from weir.catalog.repository.triton import DEEPEST, read_pbtxt

TEXT = """
name: "simple"  # a comment
platform: 'onnx' max_batch_size: 8;
input [
  { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] },
  { name: "INPUT1", data_type: TYPE_INT32, dims: -1 dims: 2 }
]
output < name: "a" "b\\n" >
dynamic_batching { max_queue_delay_microseconds: 100 preserve_ordering: true }
scale: 1.5e1f
nothing {}
"""


def test_a_configuration() -> None:
    assert read_pbtxt(TEXT, "x") == {
        "name": "simple", "platform": "onnx", "max_batch_size": 8,
        "input": [
            {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]},
            {"name": "INPUT1", "data_type": "TYPE_INT32", "dims": [-1, 2]},
        ],
        "output": {"name": "ab\n"}, "dynamic_batching": {"max_queue_delay_microseconds": 100, "preserve_ordering": True},
        "scale": 15.0, "nothing": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb 2", "x: line 2: a field's name must be followed by a colon and its value"),
        ("a: 1\n: 2", "x: line 2: must be the name of a field, is ':'"),
        ("a { b: 1", "x: line 1: must be the name of a field, is ''"),
        ("a: }", "x: line 1: must be a value, is '}'"),
        ("a: [1 2]", "x: line 1: the values of a list are separated by commas"),
        ("a: [1", "x: line 1: the values of a list are separated by commas"),
        ("a: [", "x: line 1: must be a value, is ''"),
        ('a: "open', "x: line 1: cannot be read: '\"open'"),
        ("a: 1\n}", "x: line 2: must be the name of a field, is '}'"),
        ("a {" * (DEEPEST + 2), f"x: line 1: messages are nested more than {DEEPEST} deep"),
        ("a: " + "[" * (DEEPEST + 3), f"x: line 1: lists are nested more than {DEEPEST} deep"),
    ],
)
def test_what_is_broken_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_pbtxt(text, "x")
    assert refused.value.message == message
