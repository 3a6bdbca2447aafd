"""MLServer as its users start it, on given ports. Run with --http PORT --grpc PORT."""

import argparse
import os
import sys
from pathlib import Path

MODELS = Path(__file__).with_name("mlserver_models")


def main() -> None:
    """Start the server in place of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    said = parser.parse_args()
    command = str(Path(sys.executable).with_name("mlserver"))
    ports = {"MLSERVER_HTTP_PORT": said.http, "MLSERVER_GRPC_PORT": said.grpc}
    os.chdir(MODELS)
    os.execve(command, [command, "start", "."], {**os.environ, **ports, "PYTHONPATH": str(MODELS)})


if __name__ == "__main__":
    main()
