"""What the storm takes for a finding in a server's log."""

import pytest
from rich.console import Console
from tests.fuzz.storm import Findings, Tracebacks

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in answer
    1 // 0
ZeroDivisionError: division by zero
"""
CAUSED = f"{TRACEBACK}\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("logged", "found"),
    [
        ("worker ready\nrefused\n", 0),
        (f"a call could not be answered\n{TRACEBACK}", 1),
        (f"a call failed\n{TRACEBACK}another failed\n{TRACEBACK}", 2),
        (f"12:00 [error] model error  [weir] model=length\n{TRACEBACK}worker ready\n", 0),
        (f"12:00 [error] model error  [weir] model=length\n{CAUSED}a call failed\n{TRACEBACK}", 1),
    ],
)
def test_tracebacks_are_found_but_those_of_models(logged: str, found: int, size: int) -> None:
    findings = Findings(Console(quiet=True))
    tracebacks = Tracebacks(findings)
    for start in range(0, len(logged), size):
        tracebacks.read(logged[start : start + size].encode())
    assert findings.counts == ({"a traceback: ZeroDivisionError: division by zero": found} if found else {})


@pytest.mark.parametrize(
    ("logged", "found"),
    [
        ("12:00 [error] model error error='no\\nforged-line'\n    | forged-line\n", 0),
        ("no\nforged-line [info] served\n", 1),
        ("no\x1b[2J\n", 1),
        ("no\x9b2K\n", 1),
    ],
)
def test_what_a_caller_wrote_is_no_line_of_the_log(logged: str, found: int) -> None:
    findings = Findings(Console(quiet=True))
    Tracebacks(findings).read(logged.encode())
    assert findings.counts.total() == found
