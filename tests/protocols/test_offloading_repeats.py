"""The memory of heads."""

from weir.protocols.offloading import HeadMemo


def test_takes_in_at_the_second_offer() -> None:
    memo: HeadMemo[int] = HeadMemo()
    memo.offer(b"a", 1)
    assert memo.find(b"a") is None
    memo.offer(b"a", 1)
    assert memo.find(b"a") == 1


def twice(memo: HeadMemo[int], *heads: bytes) -> None:
    for head in heads:
        memo.offer(head, 1)
        memo.offer(head, 1)


def test_is_bounded_in_entries_the_oldest_goes() -> None:
    memo: HeadMemo[int] = HeadMemo(max_entries=2)
    twice(memo, b"a", b"b", b"c")
    assert [memo.find(head) for head in (b"a", b"b", b"c")] == [None, 1, 1]
    assert len(memo) == 2


def test_is_bounded_in_bytes() -> None:
    memo: HeadMemo[int] = HeadMemo(max_bytes=1000)
    twice(memo, *(bytes([number]) * 300 for number in range(65, 75)))
    assert len(memo) == 3


def test_long_heads_are_not_worth_it() -> None:
    memo: HeadMemo[int] = HeadMemo()
    twice(memo, b"a" * 5000)
    assert len(memo) == 0


def test_what_was_seen_once_is_bounded() -> None:
    memo: HeadMemo[int] = HeadMemo(max_seen=2)
    for head in (b"a", b"b", b"c", b"a"):
        memo.offer(head, 1)
    assert len(memo) == 0


def test_clear_forgets_everything() -> None:
    memo: HeadMemo[int] = HeadMemo()
    find = memo.find
    twice(memo, b"a")
    memo.clear()
    assert find(b"a") is None
    memo.offer(b"a", 2)
    assert find(b"a") is None
    memo.offer(b"a", 2)
    assert find(b"a") == 2
