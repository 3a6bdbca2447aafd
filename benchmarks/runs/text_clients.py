"""`text_clients URL ZMQ_PORT ZMQ_PORT_OUT flood SECONDS | drip SECONDS CLIENTS | steady SECONDS BEGIN`: clients of the crowd, in a process of their own.

Ports of 0 are none: clients ask the URL over HTTP then.

`flood` sends 10,000 sentences every 10 ms, or as fast as they are taken; `drip` are clients of a sentence a second each; `steady` keeps
four requests of 64 sentences under way from the time BEGIN on. Prints what came of it as JSON.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weir.bench.vectors import WORDS
from weir.client import EmbeddingClient
from weir.client.retrying import NEVER
from weir.embedding.bert_as_service.client import BertTransport
from weir.errors import WeirError

MANY, EVERY = 10_000, 0.01
UNDER_WAY, TOGETHER = 4, 64
WORDS_EACH = 12


def sentences(count: int, seed: int) -> list[str]:
    """Return so many, all of one length."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=WORDS_EACH)) for _ in range(count)]


def flood(connect: Callable[[], EmbeddingClient], seconds: float) -> dict[str, Any]:
    """Send without waiting for answers."""
    texts, sent = sentences(MANY, 1), 0
    client = connect()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.encode(texts, blocking=False)
        sent += 1
        # The client itself keeps 32 calls on the line at most, so that more than that wait here and cost memory only.
        time.sleep(EVERY if sent < 16 else max(0.0, end - time.monotonic()))
    return {"sent": sent, "texts": MANY}


def drip(connect: Callable[[], EmbeddingClient], seconds: float, clients: int) -> dict[str, Any]:
    """Send one sentence a second from each client; return how long the answers took."""

    def one(place: int) -> list[float]:
        took = []
        with connect() as client:
            begin = time.monotonic() + place / clients
            for turn, text in enumerate(sentences(int(seconds), 100 + place)):
                time.sleep(max(0.0, begin + turn - time.monotonic()))
                sent = time.perf_counter()
                client.encode([text])
                took.append(time.perf_counter() - sent)
        return took

    with ThreadPoolExecutor(clients) as pool:
        return {"seconds": [each for took in pool.map(one, range(clients)) for each in took]}


def steady(connect: Callable[[], EmbeddingClient], seconds: float, begin: float) -> dict[str, Any]:
    """Keep the same number of texts under way all the time; return texts per second, from the first answer to the last."""
    texts = sentences(TOGETHER, 7)
    with connect() as client, ThreadPoolExecutor(UNDER_WAY) as pool:
        client.encode(["ready"])
        time.sleep(max(0.0, begin - time.time()))
        started = time.monotonic()

        def keep_asking(_: int) -> list[float]:
            answered = []
            while time.monotonic() - started < seconds:
                client.encode(texts)
                answered.append(time.monotonic())
            # Only what came in time counts, so that neither gains from running on alone.
            return [each for each in answered if each - started < seconds]

        answered = sorted(each for mine in pool.map(keep_asking, range(UNDER_WAY)) for each in mine)
    if len(answered) < 2:
        sys.exit(f"steady: {len(answered)} answers in {seconds:g} s, no rate can be told")
    return {"rate": TOGETHER * (len(answered) - 1) / (answered[-1] - answered[0])}


def main() -> None:
    """Do what is asked."""
    url, port, port_out, what, *told = sys.argv[1:]

    def connect() -> EmbeddingClient:
        retry = NEVER if what == "flood" else None
        transport = BertTransport("127.0.0.1", int(port), int(port_out)) if int(port) else None
        return EmbeddingClient(url, timeout=600, ignore_all_checks=True, retry=retry, transport=transport)

    kinds: dict[str, Callable[..., dict[str, Any]]] = {"flood": flood, "drip": drip, "steady": steady}
    numbers = [int(each) if each.isdecimal() else float(each) for each in told]
    try:
        print(json.dumps(kinds[what](connect, *numbers)), flush=True)
    except WeirError as error:
        sys.exit(f"{what}: {error}")
    os._exit(0)  # what is still under way would be waited for


if __name__ == "__main__":
    main()
