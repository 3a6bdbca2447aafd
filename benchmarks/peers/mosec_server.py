"""mosec 0.9.8: `square`, or the `length` of a large body; one worker, batches up to 64, 5 ms wait. Run with MODEL --port PORT."""

import sys

from mosec import Server, Worker


class Square(Worker):
    def forward(self, data):
        return [x * x for x in data]


class Length(Worker):
    def deserialize(self, data):
        return data

    def forward(self, data):
        return [len(body) for body in data]


if __name__ == "__main__":
    model = {"square": Square, "length": Length}[sys.argv.pop(1)]  # mosec reads the other arguments
    server = Server()
    server.append_worker(model, num=1, max_batch_size=64, max_wait_time=5)
    server.run()
