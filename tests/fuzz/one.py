"""Fuzzes one target: `python -m tests.fuzz.one TARGET [libFuzzer's options and folders]`."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-untyped, unused-ignore]  # it has no types, and need not be installed

INSTRUMENTED = [
    "weir.wire", "weir.images", "weir.workers.run.tensors", "weir.frontends.http.fast.plan", "weir.text_models.checkpoint", "weir.text_models.tokenizer", "weir.text_models.tokenizer_files", "weir.text_models.tokenizer",
]  # fmt: skip

with atheris.instrument_imports(include=INSTRUMENTED):
    from tests.fuzz.targets import TARGETS


def _keep_what_breaks(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return `target`, which writes the input that it raises for to where libFuzzer would: atheris ends without."""
    prefix = next((each.partition("=")[2] for each in sys.argv if each.startswith("-artifact_prefix=")), None)

    def kept(data: bytes) -> None:
        try:
            target(data)
        except BaseException:
            if prefix is not None:
                Path(f"{prefix}crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)  # as libFuzzer
            raise

    return kept


if __name__ == "__main__":
    name = sys.argv.pop(1)
    sys.argv[0] = f"{sys.executable} -m tests.fuzz.one {name}"  # what libFuzzer runs again to merge folders
    atheris.Setup(sys.argv, _keep_what_breaks(TARGETS[name]))
    atheris.Fuzz()
