"""timeline.py: texts are read while others are computed, shown with a real model, its tokenizer and a worker process."""

import asyncio
import json
from pathlib import Path

from benchmarks.harness.texts import Span, Timeline
from tests.text_models import tiny

from weir import Service
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TextEncoder
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.texts import TextQuery
from weir.text_server.tokenizing import TokenizerThreads

WORDS = ["first", "then", "do", "it", "right", "better"]
COUNT = 1500


def test_reading_and_computing_overlap(tmp_path: Path) -> None:
    folder = tiny.sentence_model(tmp_path / "small", max_length=20)
    checkpoint = read_checkpoint(folder)
    texts = [
        " ".join(WORDS[(number >> place) % 6] for place in range(1 + number % 9)) + f" {number}"
        for number in range(COUNT)
    ]
    timeline = Timeline()

    async def main() -> None:
        params = {"directory": str(folder), "cache": str(tmp_path / "cache"), "devices": ["cpu"]}
        async with Service(
            TextEncoder, params=params, observers=[timeline], max_batch_size=8, pipeline_depth=2
        ) as service:
            threads = TokenizerThreads(checkpoint.tokenizer(), on_round=timeline.read)
            encoder = Encoder(service, threads, TextShape(tiny.HIDDEN, 20))
            encoded = await encoder.encode(texts, TextQuery("test"))
            assert encoded.vectors.shape == (COUNT, tiny.HIDDEN)
            encoder.close()

    asyncio.run(main())
    assert sum(span.texts for span in timeline.reading) == sum(span.texts for span in timeline.predicting) == COUNT
    assert timeline.overlap() > 0.0
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"thread_name", "read", "predict"}
    assert sum(event["args"]["texts"] for event in events if event["name"] == "read") == COUNT


def test_overlap_counts_each_second_once() -> None:
    timeline = Timeline()
    timeline.read(0.0, 4.0, 1)
    assert timeline.overlap() == 0.0
    timeline.predicting += [Span(1.0, 2.0, 1, 0), Span(1.5, 3.0, 1, 1), Span(3.5, 9.0, 1, 0), Span(9.0, 9.5, 1, 0)]
    assert timeline.overlap() == 2.5
