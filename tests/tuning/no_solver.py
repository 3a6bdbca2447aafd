"""A program that answers a wish with what is no bank."""

import socket

from weir.tuning.solving import ANSWER

if __name__ == "__main__":
    with socket.socket(fileno=0) as end:
        end.recv(1 << 20)
        end.sendall(ANSWER.pack(0, 6) + b"a poem")
        end.recv(1)
