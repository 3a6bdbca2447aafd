"""LitServe 0.2.19. Run with --port PORT."""

import sys

import litserve as ls
from computing import compute, judged

KIND, BATCH, WAIT = judged()


class One(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request

    def predict(self, item):
        compute(KIND, 1)
        return item

    def encode_response(self, output):
        return output


class Many(One):
    def batch(self, inputs):
        return inputs

    def predict(self, batch):
        compute(KIND, len(batch))
        return batch

    def unbatch(self, output):
        return output


if __name__ == "__main__":
    api = Many(max_batch_size=BATCH, batch_timeout=WAIT / 1000) if BATCH else One()
    server = ls.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error", access_log=False)
