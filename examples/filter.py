"""A worker that drives an external program: each item goes through a filter that runs beside it, a line in and a line out.

    weir serve examples.filter:Shout --workers 2

The program is a worker's accelerator: acquired in `load`, released in `unload`. When it dies, so does its worker (SystemExit),
and Weir starts another, which starts another program; what was being computed runs again.
"""

import subprocess
from typing import Any, ClassVar

import weir

UPPER = ("perl", "-pe", "BEGIN { $| = 1 } $_ = uc $_")


class Shout(weir.Model):
    """Text to upper case, by a Perl program."""

    Input = str
    Output = str
    examples: ClassVar[list[Any]] = [weir.Example("weir", expected="WEIR")]
    max_batch_size = 16

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or UPPER

    def load(self) -> None:
        self._program = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def preprocess(self, item: str) -> str:
        if "\n" in item:
            raise weir.InvalidRequest(f"item: must be one line, has {item.count(chr(10)) + 1}")
        return item

    def predict(self, batch: list[str]) -> list[str]:
        program = self._program
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            answers = []
            for line in batch:
                program.stdin.write(line + "\n")
                program.stdin.flush()
                answers.append(program.stdout.readline())
        except BrokenPipeError:
            raise SystemExit("the program has died") from None
        if "" in answers:
            raise SystemExit("the program has died")
        return [line.removesuffix("\n") for line in answers]

    def unload(self) -> None:
        self._program.communicate()
