"""mosec 0.9.8: square, one worker, batches up to 64, 5 ms wait. Run with --port PORT."""

from mosec import Server, Worker


class Square(Worker):
    def forward(self, data):
        return [x * x for x in data]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Square, num=1, max_batch_size=64, max_wait_time=5)
    server.run()
