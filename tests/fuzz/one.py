"""Fuzzes one target: `python -m tests.fuzz.one TARGET [libFuzzer's options and folders]`."""

import sys

import atheris  # type: ignore[import-untyped, unused-ignore]  # it has no types, and need not be installed

INSTRUMENTED = [
    "weir.wire", "weir.images", "weir.workers.run.tensors", "weir.frontends.http.fast.plan", "weir.text_models.checkpoint", "weir.text_models.tokenizer", "weir.text_models.tokenizer_files", "weir.text_models.tokenizer",
]  # fmt: skip

with atheris.instrument_imports(include=INSTRUMENTED):
    from tests.fuzz.targets import TARGETS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    sys.argv[0] = f"{sys.executable} -m tests.fuzz.one {name}"  # what libFuzzer runs again to merge folders
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()
