"""Tables of parquet, where pyarrow is: `make test-clients`."""

import json
from pathlib import Path

import pytest
from tests.served import weir_here

pytestmark = pytest.mark.clients

MODELS = Path(__file__).with_name("models.py")


def test_a_column_of_a_table(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    source, out = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    texts = [f"{'x' * (number % 7)}" for number in range(2500)]  # more than are read at once
    table = pyarrow.table({"id": range(2500), "review": texts, "vector": [[number, 2] for number in range(2500)]})
    parquet.write_table(table, source)
    words = ["batch", "run", source, f"{MODELS}:Length", "-o", out, "--url", "/infer/length"]
    done = weir_here(*words, "--column", "review")
    assert (done.returncode, done.stdout.strip()) == (0, f"2500 responses: {out}"), done.stderr
    answers = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    assert answers == [len(text) for text in texts]
    assert weir_here(*words, "--column", "vector").returncode == 0
    assert json.loads(out.read_text().splitlines()[-1])["response"]["body"] == 2  # a list stays one
    refused = weir_here(*words)
    said = f"weir: {source}: --column=None: must be one of id, review, vector\n"
    assert (refused.returncode, refused.stderr) == (2, said)
    source.write_bytes(b"no table")
    refused = weir_here(*words, "--column", "review")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"weir: {source}: is not a parquet file: ")
