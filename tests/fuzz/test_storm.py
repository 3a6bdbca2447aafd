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


DIVISION, FORGED = "a traceback: ZeroDivisionError: division by zero", "a forged line"
LOGS: dict[str, dict[str, int]] = {
    "worker ready\nrefused\n": {},
    f"a call could not be answered\n{TRACEBACK}": {DIVISION: 1},
    f"a call failed\n{TRACEBACK}another failed\n{TRACEBACK}": {DIVISION: 2},
    f"12:00 [error] model error  [weir] model=length\n{TRACEBACK}worker ready\n": {},
    f"12:00 [error] model error  [weir] model=length\n{CAUSED}a call failed\n{TRACEBACK}": {DIVISION: 1},
    "12:00 [error] model error error='no\\nforged-line'\n    | forged-line\n": {},
    "no\nforged-line [info] served\n": {FORGED: 1},
    "no\x1b[2J\n": {FORGED: 1},
    "no\x9b2K\n": {FORGED: 1},
}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tracebacks_and_lines_of_callers_are_found_in_the_log(size: int) -> None:
    for logged, found in LOGS.items():
        findings, data = Findings(Console(quiet=True)), logged.encode()
        tracebacks = Tracebacks(findings)
        for start in range(0, len(data), size):
            tracebacks.read(data[start : start + size])
        assert findings.counts == found, logged
