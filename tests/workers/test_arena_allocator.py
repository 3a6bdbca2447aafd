from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weir.workers.arena import ALIGNMENT, Allocator


def test_places_are_aligned_and_do_not_overlap() -> None:
    allocator = Allocator(64 * 100)

    first, second = allocator.allocate(65), allocator.allocate(1)

    assert (first, second) == (0, 128)
    assert allocator.free_bytes == 64 * 97


def test_a_full_range_has_no_place_left_until_one_is_given_back() -> None:
    allocator = Allocator(64 * 4)
    places = [allocator.allocate(64) for _ in range(4)]
    assert allocator.allocate(1) is None

    allocator.free(128)

    assert places == [0, 64, 128, 192]
    assert allocator.allocate(64) == 128


def test_free_neighbours_become_one_place_whatever_the_order() -> None:
    for order in ([0, 64, 128], [128, 64, 0], [0, 128, 64], [64, 0, 128]):
        allocator = Allocator(64 * 3)
        for _ in order:
            allocator.allocate(64)
        for offset in order:
            allocator.free(offset)
        assert allocator.allocate(64 * 3) == 0


def test_the_shortest_place_that_suffices_is_taken_and_the_lowest_of_equals() -> None:
    allocator = Allocator(64 * 10)
    offsets = [allocator.allocate(size) for size in (128, 64, 64, 64, 64, 64)]
    for position in (0, 2, 4):  # places of 128, 64 and 64 bytes
        offset = offsets[position]
        assert offset is not None
        allocator.free(offset)

    assert allocator.allocate(64) == offsets[2]
    assert allocator.allocate(64) == offsets[4]
    assert allocator.allocate(128) == offsets[0]


def test_a_range_shorter_than_the_alignment_has_no_place() -> None:
    allocator = Allocator(63)

    assert allocator.size_bytes == allocator.free_bytes == 0
    assert allocator.allocate(0) is None


def test_what_is_asked_for_one_after_the_other_lies_so_though_holes_would_do() -> None:
    allocator = Allocator(64 * 100)
    places = [allocator.allocate(64) for _ in range(8)]
    allocator.free(64)
    allocator.free(192)

    assert [allocator.allocate(64) for _ in range(2)] == [64 * 8, 64 * 9]
    assert places == [64 * place for place in range(8)]


def test_a_line_of_places_goes_no_further_than_twice_what_is_taken() -> None:
    allocator = Allocator(64 * 1000)
    waiting: list[int] = []
    furthest = 0
    for _ in range(200):
        offset = allocator.allocate(64)
        assert offset is not None
        furthest = max(furthest, offset)
        waiting.append(offset)
        if len(waiting) == 8:
            allocator.free(waiting.pop(0))

    assert furthest <= 64 * 2 * 8
    runs = sum(after - before == 64 for before, after in pairwise(waiting))
    assert runs >= len(waiting) - 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=200))
def test_whatever_happens_places_are_disjoint_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(4096)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            offset = allocator.allocate(number)
            if offset is None:
                continue
            length = max(1, -(-number // ALIGNMENT)) * ALIGNMENT
            assert offset % ALIGNMENT == 0
            assert offset + length <= 4096
            assert all(offset + length <= other or other + size <= offset for other, size in taken.items())
            taken[offset] = length
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            del taken[offset]
            allocator.free(offset)
        assert allocator.free_bytes == 4096 - sum(taken.values())
        assert len(allocator) == len(taken)
    for offset in taken:
        allocator.free(offset)
    assert allocator.allocate(4096) == 0
