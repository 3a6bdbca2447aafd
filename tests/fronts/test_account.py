"""The limits of a server with several processes are those of one."""

import os

import pytest

from weir.errors import Overloaded, TooLarge
from weir.fronts.account import SharedAccount, SharedFigures, table_bytes
from weir.protocols.settings import HttpSettings
from weir.workers.arena import create_memory

SETTINGS = HttpSettings(max_connections=3, max_waiting_bytes=64 << 20)


@pytest.fixture
def accounts() -> tuple[SharedFigures, list[SharedAccount]]:
    fd = create_memory("test-figures", table_bytes(3))
    figures = [SharedFigures(fd, 3) for _ in range(3)]  # as three processes map it
    os.close(fd)
    return figures[0], [SharedAccount(SETTINGS, own, index) for index, own in enumerate(figures)]


def test_bytes_of_one_count_for_all(accounts: tuple[SharedFigures, list[SharedAccount]]) -> None:
    _, (first, second, third) = accounts
    first.take(40 << 20)
    second.take(20 << 20)
    with pytest.raises(Overloaded, match=f"hold {60 << 20} bytes"):
        third.take(5 << 20)
    with pytest.raises(TooLarge):
        third.take(65 << 20)
    assert third.total_refused == first.total_refused == 2
    first.give(40 << 20)
    third.take(5 << 20)
    assert (first.total_bytes, first.held_bytes, third.held_bytes) == (25 << 20, 0, 5 << 20)
    second.add(60 << 20)  # what exists already
    assert second.over and second.pressed() and first.over


def test_connections_of_one_count_for_all_at_once(accounts: tuple[SharedFigures, list[SharedAccount]]) -> None:
    figures, processes = accounts
    sets = [account.connection_set() for account in processes]
    for account, connections in zip(processes, sets, strict=True):
        account.counters.append(connections.__len__)
        connections.add(object())
    assert all(account.full for account in processes)
    one = sets[1].pop()
    sets[1].add(one)
    sets[1].discard(one)
    sets[1].discard(one)
    assert [account.connections for account in processes] == [2, 2, 2]
    figures.clear(2)
    assert processes[0].connections == 1


def test_an_ended_process_holds_nothing(accounts: tuple[SharedFigures, list[SharedAccount]]) -> None:
    figures, (first, second, _) = accounts
    second.take(64 << 20)
    figures.clear(1)
    first.take(64 << 20)
    assert first.total_bytes == 64 << 20
