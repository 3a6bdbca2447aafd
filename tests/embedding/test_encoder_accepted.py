"""At the end: what was accepted is finished, and no more is taken."""

import asyncio

import pytest
from tests.embedding.test_encoder import of, serving
from tests.embedding.text_models import Words

from weir.embedding.encoder import Accepted
from weir.embedding.tokens.threads import BRIEF_CHARACTERS
from weir.errors import Draining


def test_all_of_a_large_request_goes_through_the_line_before_the_end() -> None:
    async def main() -> None:
        words = Words()
        words.gate.clear()
        async with serving(words=words) as encoder:
            large = asyncio.ensure_future(of(encoder, [f"{number}" for number in range(4 * encoder.window)]))
            small = asyncio.ensure_future(of(encoder, ["a" * (BRIEF_CHARACTERS + 1)]))
            await asyncio.sleep(0)
            draining = asyncio.ensure_future(encoder.drain())
            await asyncio.sleep(0)
            with pytest.raises(Draining, match="about to stop"):
                await of(encoder, ["late"])
            assert not draining.done()
            words.gate.set()
            assert await draining
            assert (len((await large).counts), len((await small).counts)) == (4 * encoder.window, 1)

    asyncio.run(main())


def test_what_is_not_finished_in_time() -> None:
    async def main() -> None:
        accepted = Accepted()
        accepted.begin()
        assert not await accepted.drained(0.0)
        accepted.end()
        assert await accepted.drained(0.0)

    asyncio.run(main())
