"""Runs of texts of like length, and what fills them up."""

import numpy as np

from weir.embedding.model import TokenIds, filled, runs


def read(*ids: int, second: int = 0) -> TokenIds:
    return TokenIds(np.array(ids, np.int32), second)


def test_texts_of_like_length_run_together() -> None:
    assert list(runs([9, 2, 8, 1, 2], 20)) == [[3, 1, 4], [2, 0]]


def test_no_run_has_more_tokens_than_it_may_but_for_a_text_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300).tolist()
    cut = list(runs(lengths, 128))
    assert sorted(place for run in cut for place in run) == list(range(300))
    assert all(len(run) == 1 or len(run) * max(lengths[place] for place in run) <= 128 for run in cut)
    waste = sum(len(run) * max(lengths[place] for place in run) for run in cut) / sum(lengths) - 1
    assert waste < 0.02


def test_padding_may_count_less_than_tokens() -> None:
    assert list(runs([2, 10, 4], 12)) == [[0, 2], [1]]
    assert list(runs([2, 10, 4], 20, 0.25)) == [[0, 2, 1]]  # 16 tokens, and 14 of padding: 19.5
    assert list(runs([2, 10, 4], 19, 0.25)) == [[0, 2], [1]]


def test_nothing_makes_no_run() -> None:
    assert list(runs([], 128)) == []


def test_shorter_texts_are_filled_up_and_do_not_count_there() -> None:
    inputs = filled([read(2, 7, 3), read(2, 5, 3, 6, 3, second=3)], pad_id=1, mask_special=False)
    assert inputs.ids.tolist() == [[2, 7, 3, 1, 1], [2, 5, 3, 6, 3]]
    assert inputs.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert inputs.types.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    assert inputs.pool.tolist() == inputs.mask.tolist()
    assert [array.dtype.name for array in inputs] == ["int32", "int32", "int32", "float32"]


def test_special_tokens_do_not_count_where_that_is_asked_unless_there_are_no_others() -> None:
    inputs = filled([read(2, 7, 8, 3), read(2, 3)], pad_id=0, mask_special=True)
    assert inputs.pool.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]


def test_hidden_tokens_are_not_there_for_the_others() -> None:
    texts = [read(2, 7, 8, 3), read(2, 3), read(2, 5, 3, 6, 3, second=3)]
    inputs = filled(texts, pad_id=0, mask_special=True, hide_special=True)
    assert inputs.mask.tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]]
    assert inputs.pool.tolist() == inputs.mask.tolist()
    shown = filled(texts, pad_id=0, mask_special=False, hide_special=True)
    assert shown.pool.tolist() == inputs.pool.tolist() and shown.ids.tolist() == inputs.ids.tolist()


def test_a_fixed_length_fills_every_text_up() -> None:
    assert filled([read(2, 3)], pad_id=0, mask_special=False, length=4).ids.shape == (1, 4)
