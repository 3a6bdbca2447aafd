"""mosec 0.9.8. Run with --port PORT."""

from computing import compute, judged
from mosec import Server, Worker

KIND, BATCH, WAIT = judged()


class One(Worker):
    def forward(self, data):
        compute(KIND, 1)
        return data


class Many(Worker):
    def forward(self, data):
        compute(KIND, len(data))
        return data


if __name__ == "__main__":
    server = Server()
    if BATCH:
        server.append_worker(Many, num=1, max_batch_size=BATCH, max_wait_time=max(1, WAIT))
    else:
        server.append_worker(One, num=1)
    server.run()
