"""What the texts and the vectors of a request take is charged before they are there."""

import pytest
from tests.text_server.test_encoder import serving
from tests.text_server.text_models import DIMENSIONS, PerToken

from weir.errors import (
    ModelError,
    Overloaded,
    TooLarge,
)
from weir.protocols import HttpSettings
from weir.protocols.account import CLAIM, Account
from weir.text_server.texts import TextOptions, TextQuery, texts_bytes


async def test_vectors_of_tokens_are_charged_when_it_is_known_how_many_there_are() -> None:
    account = Account(HttpSettings(max_waiting_bytes=DIMENSIONS * 4 * 1000 + texts_bytes(["a b c d"] * 403)))
    async with serving(PerToken, options={"of_tokens": True}) as encoder:
        with account.claim() as claim:
            token = CLAIM.set(claim)
            assert (await encoder.encode(["a b c d", "a", "a"], TextQuery("test"))).vectors.shape[:2] == (3, 4)
            assert claim.held_bytes == DIMENSIONS * 4 * 3 * 4 + texts_bytes(["a b c d", "a", "a"])
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                await encoder.encode(["a b c d"] * 400, TextQuery("test"))
            CLAIM.reset(token)
        assert account.held_bytes == 0


async def test_vectors_are_charged_before_they_are_computed() -> None:
    account = Account(HttpSettings(max_waiting_bytes=DIMENSIONS * 4 * 1000 + texts_bytes(["same"] * 1000)))
    async with serving() as encoder:
        with account.claim() as claim:
            token = CLAIM.set(claim)
            assert len((await encoder.encode(["same"] * 900, TextQuery("test"))).vectors) == 900
            assert claim.held_bytes == DIMENSIONS * 4 * 900 + texts_bytes(["same"] * 900)
            with pytest.raises(Overloaded, match="max_waiting_bytes"):
                await encoder.encode(["same"] * 900, TextQuery("test"))
            with pytest.raises(TooLarge, match="max_waiting_bytes"):
                await encoder.encode(["same"] * 1001, TextQuery("test"))
            CLAIM.reset(token)
        assert account.held_bytes == 0


@pytest.mark.parametrize("way", ["encode", "decode", "tokenize"])
async def test_the_texts_themselves_are_charged(way: str) -> None:
    ids, text = list(range(10_000)), "x" * 100_000
    account = Account(HttpSettings(max_waiting_bytes=1 << 30))
    async with serving() as encoder:
        with account.claim() as claim:
            token = CLAIM.set(claim)
            if way == "encode":
                with pytest.raises(ModelError):  # this tokenizer reads no ids
                    await encoder.encode([ids], TextQuery("test", TextOptions(truncate=False)))
            elif way == "decode":
                await encoder.decode([ids], skip_special=True)
            else:
                await encoder.tokenize([text], special=True, prompt=None)
            assert claim.held_bytes >= 400_000
            CLAIM.reset(token)


async def test_a_text_that_is_split_is_charged_for_all_its_tokens() -> None:
    account = Account(HttpSettings(max_waiting_bytes=1_000_000))
    async with serving(options={"split": True}) as encoder:
        with account.claim() as claim:
            token = CLAIM.set(claim)
            await encoder.encode(["a b c"] * 20, TextQuery("test"))
            assert 600 < claim.held_bytes < 100_000
            # It is cut, not split.
            await encoder.encode(["a" * 10_000], TextQuery("test", TextOptions(truncate=True)))
            with pytest.raises(TooLarge, match="max_waiting_bytes"):
                await encoder.encode(["a" * 10_000], TextQuery("test"))
            CLAIM.reset(token)
