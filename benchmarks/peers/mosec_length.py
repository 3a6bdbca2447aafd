"""mosec 0.9.8: the length of a large body, one worker, batches up to 64, 5 ms wait. Run with --port PORT."""

from mosec import Server, Worker


class Length(Worker):
    def deserialize(self, data):
        return data

    def forward(self, data):
        return [len(body) for body in data]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Length, num=1, max_batch_size=64, max_wait_time=5)
    server.run()
