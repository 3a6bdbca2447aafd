"""What the texts and the vectors of a request take is charged before they are there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.text_server.test_encoder import serving
from tests.text_server.text_models import DIMENSIONS, PerToken

from weir.errors import ModelError, Overloaded, TooLarge
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account, Claim
from weir.text_server.texts import TextOptions, TextQuery, texts_bytes

QUERY = TextQuery("test")


@contextmanager
def charged(max_waiting_bytes: int) -> Iterator[Claim]:
    """Charge what the block does to the claim."""
    account = Account(HttpSettings(max_waiting_bytes=max_waiting_bytes))
    with account.claim() as claim:
        token = CLAIM.set(claim)
        yield claim
        CLAIM.reset(token)
    assert account.held_bytes == 0


async def test_vectors_of_tokens_are_charged_when_it_is_known_how_many_there_are() -> None:
    async with serving(PerToken, options={"of_tokens": True}) as encoder:
        with charged(DIMENSIONS * 4 * 1000 + texts_bytes(["a b c d"] * 403)) as claim:
            assert (await encoder.encode(["a b c d", "a", "a"], QUERY)).vectors.shape[:2] == (3, 4)
            assert claim.held_bytes == DIMENSIONS * 4 * 3 * 4 + texts_bytes(["a b c d", "a", "a"])
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                await encoder.encode(["a b c d"] * 400, QUERY)


async def test_vectors_are_charged_before_they_are_computed() -> None:
    async with serving() as encoder:
        with charged(DIMENSIONS * 4 * 1000 + texts_bytes(["same"] * 1000)) as claim:
            assert len((await encoder.encode(["same"] * 900, QUERY)).vectors) == 900
            assert claim.held_bytes == DIMENSIONS * 4 * 900 + texts_bytes(["same"] * 900)
            for count, kind in ((900, Overloaded), (1001, TooLarge)):
                with pytest.raises(kind, match="max_waiting_bytes"):
                    await encoder.encode(["same"] * count, QUERY)


@pytest.mark.parametrize("way", ["encode", "decode", "tokenize"])
async def test_the_texts_themselves_are_charged(way: str) -> None:
    ids = list(range(10_000))
    async with serving() as encoder:
        with charged(1 << 30) as claim:
            if way == "encode":
                with pytest.raises(ModelError):  # this tokenizer reads no ids
                    await encoder.encode([ids], TextQuery("test", TextOptions(truncate=False)))
            elif way == "decode":
                await encoder.decode([ids], skip_special=True)
            else:
                await encoder.tokenize(["x" * 100_000], special=True, prompt=None)
            assert claim.held_bytes >= 400_000


async def test_a_text_that_is_split_is_charged_for_all_its_tokens() -> None:
    async with serving(options={"split": True}) as encoder:
        with charged(1_000_000) as claim:
            await encoder.encode(["a b c"] * 20, QUERY)
            assert 600 < claim.held_bytes < 100_000
            # It is cut, not split.
            await encoder.encode(["a" * 10_000], TextQuery("test", TextOptions(truncate=True)))
            with pytest.raises(TooLarge, match="max_waiting_bytes"):
                await encoder.encode(["a" * 10_000], QUERY)
