"""mosec 0.9.8: `square`, or the `length` of a large body; one worker, batches up to 64, 5 ms wait; `single`: square without batches, and so without a
wait; `nap`: a model that sleeps 0.5 ms, so many workers, batches up to 128, no wait. SETTINGS (JSON) changes those of `square` and `length`. Run with
MODEL [WORKERS] --port PORT."""

import json
import os
import sys
import time

from mosec import Server, Worker


class Square(Worker):
    def forward(self, data):
        return [x * x for x in data]


class Single(Worker):
    def forward(self, data):
        return data * data


class Nap(Worker):
    def forward(self, data):
        time.sleep(0.0005)
        return [x * x for x in data]


class Length(Worker):
    def deserialize(self, data):
        return data

    def forward(self, data):
        return [len(body) for body in data]


if __name__ == "__main__":
    name = sys.argv.pop(1)  # mosec reads the other arguments
    server = Server()
    if name == "single":
        server.append_worker(Single, num=1)
    elif name == "nap":
        server.append_worker(Nap, num=int(sys.argv.pop(1)), max_batch_size=128, max_wait_time=1)
    else:
        settings = {"num": 1, "max_batch_size": 64, "max_wait_time": 5, **json.loads(os.environ.get("SETTINGS", "{}"))}
        server.append_worker({"square": Square, "length": Length}[name], **settings)
    server.run()
