"""Makes a model's folder for Triton and becomes the server. Run with the ports HTTP GRPC."""

import os
import sys
import tempfile
from pathlib import Path

from computing import judged

HERE = Path(__file__).parent


def main():
    """Start the server in place of this process."""
    _, batch, wait = judged()
    http, grpc = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="judged-"))
    (folder / "judged" / "1").mkdir(parents=True)
    for source, name in (
        ("triton_model.py", "model.py"),
        ("computing.py", "computing.py"),
    ):  # Triton looks nowhere else
        (folder / "judged" / "1" / name).write_text((HERE / source).read_text())
    tensor = '[ {{ name: "{}" data_type: TYPE_FP32 dims: [ 1 ] }} ]'.format
    lines = [
        'name: "judged"', 'backend: "python"', f"max_batch_size: {batch or 32}", f"input {tensor('x')}", f"output {tensor('y')}",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]  # fmt: skip
    if batch:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {1000 * wait} }}")
    (folder / "judged" / "config.pbtxt").write_text("\n".join(lines))
    command = [sys.executable, str(HERE.parent / "triton.py"), "--http", http, "--grpc", grpc, "--models", str(folder)]
    os.execve(command[0], command, os.environ)


if __name__ == "__main__":
    main()
