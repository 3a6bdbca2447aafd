"""MLServer 1.7.1: makes a model's folder and becomes the server. Run with the ports HTTP GRPC."""

import json
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
    folder = Path(tempfile.mkdtemp(prefix="mlserver-"))
    tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 1]}
    settings = {
        "name": "judged",
        "implementation": "mlserver_model.Judged",
        "inputs": [tensor],
        "outputs": [{**tensor, "name": "y"}],
    }
    if batch:
        settings |= {"max_batch_size": batch, "max_batch_time": wait / 1000}
    (folder / "model-settings.json").write_text(json.dumps(settings))
    (folder / "settings.json").write_text(
        json.dumps({"host": "127.0.0.1", "debug": False, "parallel_workers": 1, "metrics_endpoint": None})
    )
    more = {"PYTHONPATH": str(HERE), "MLSERVER_HTTP_PORT": http, "MLSERVER_GRPC_PORT": grpc}
    program = Path(sys.executable).with_name("mlserver")
    os.chdir(folder)
    os.execve(program, [str(program), "start", "."], {**os.environ, **more})


if __name__ == "__main__":
    main()
