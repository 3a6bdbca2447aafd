"""waste.py: tokens and padding, as workers have computed them."""

import asyncio

import numpy
from prometheus_client import CollectorRegistry, generate_latest
from tests.batching.mill import Asked
from tests.embedding.text_models import Summing

from weir import Service
from weir.embedding.metrics import PaddingMetrics, RunShapes
from weir.embedding.texts import Tokens
from weir.messages import Dispatch, Reason, Request, Timing, Wakeup

TIMING = Timing(0.0, 0.0, 0.0)


def cut(*lengths: int) -> Dispatch:
    """Return a batch of texts."""
    requests: list[Request] = [Asked(Tokens(bytes(4 * length))) for length in lengths]
    return Dispatch(1, 0, requests, None, len(requests), 0.0, Reason.IDLE, 0, 0.0, None, Wakeup.ARRIVAL, 0.0)


def test_a_batch_is_filled_up_to_its_longest() -> None:
    waste = PaddingMetrics()
    waste.models["m"] = RunShapes()
    waste.computed("m", cut(10, 4, 7), TIMING, 0.0)
    waste.computed("other", cut(10, 4, 7), TIMING, 0.0)
    assert (dict(waste.tokens), dict(waste.padding)) == ({"m": 21}, {"m": 9})


def test_workers_may_cut_it_into_runs_or_fill_it_up_further() -> None:
    waste = PaddingMetrics()
    waste.models["m"] = RunShapes(lambda lengths: [[1, 2], [0]])
    waste.computed("m", cut(10, 4, 7), TIMING, 0.0)
    assert (waste.tokens["m"], waste.padding["m"]) == (21, 3)
    waste.models["m"] = RunShapes(fixed_length=16)
    waste.computed("m", cut(20, 4), TIMING, 0.0)
    assert waste.padding["m"] == 3 + 16


def test_padding_may_take_less_time_than_tokens() -> None:
    waste = PaddingMetrics()
    waste.models["m"] = RunShapes(padding_cost=0.25)
    waste.computed("m", cut(10, 4, 8), TIMING, 0.0)
    assert (waste.tokens["m"], waste.padding["m"]) == (22, 2.0)


def test_what_metrics_show() -> None:
    async def main() -> None:
        waste = PaddingMetrics()
        waste.models["summing"] = RunShapes()
        async with Service(Summing, executor="inline", observers=[waste], max_batch_size=4) as service:
            texts = [Tokens(numpy.arange(length, dtype="<i4").tobytes()) for length in (3, 9, 3, 9)]
            await service.infer_many(texts)
        registry = CollectorRegistry()
        registry.register(waste)
        text = generate_latest(registry).decode()
        assert 'weir_tokens_total{model="summing"} 24.0' in text
        assert 'weir_padding_tokens_total{model="summing"} 12.0' in text

    asyncio.run(main())


def test_a_text_that_only_the_worker_reads_has_what_it_was_thought_to_have() -> None:
    waste = PaddingMetrics()
    waste.models["m"] = RunShapes()
    dispatch = cut(8)
    dispatch.requests.append(Asked("a text", cost=5.0))
    waste.computed("m", dispatch, TIMING, 0.0)
    assert (waste.tokens["m"], waste.padding["m"]) == (13, 3)
