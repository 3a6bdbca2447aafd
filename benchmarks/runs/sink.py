"""A server that accepts connections and never reads from them. Prints its port; ends when its input does."""

import socket
import sys
import threading


def accept(listener: socket.socket) -> None:
    """Keep whatever connects, and let the kernel keep what it sends."""
    kept = []
    while True:
        kept.append(listener.accept()[0])


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        sys.stdin.read()
