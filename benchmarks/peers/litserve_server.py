"""LitServe 0.2.19: square; one worker process, batches of up to 64, all else by its defaults or by SETTINGS (JSON), without access log. Run with --port PORT."""

import argparse
import json
import os

import litserve as ls


class Square(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, batch):
        return [x * x for x in batch]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    server = ls.LitServer(Square(max_batch_size=64), accelerator="cpu", **json.loads(os.environ.get("SETTINGS", "{}")))
    server.run(
        host="127.0.0.1",
        port=parser.parse_args().port,
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )
