"""A whole server of Weir with one worker, for gunicorn: `gunicorn -k uvicorn_worker.UvicornWorker benchmarks.peers.whole_server:app`."""

from benchmarks.models import Nap

import weir

app = weir.asgi(Nap, name="model", max_batch_size=128)
