"""The account of bytes and connections, of one process and of several."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.rings import subcases

from weir.errors import Overloaded, TooLarge
from weir.protocols import HttpSettings
from weir.protocols import account as module
from weir.protocols.account import (
    CLAIM,
    Account,
    SharedAccount,
    SharedFigures,
    allow_descriptors,
    charge,
    table_bytes,
    usable_memory,
)
from weir.workers.arena import create_memory


def made(max_bytes: int = 100, **settings: Any) -> Account:
    return Account(HttpSettings(max_waiting_bytes=max_bytes, **settings))


def test_what_exceeds_the_limit_is_refused_and_not_charged() -> None:
    account = made(100)
    account.take(60)
    with pytest.raises(Overloaded, match=r"hold 60 bytes, 41 more would exceed 100 \(max_waiting_bytes\)") as refused:
        account.take(41)
    assert refused.value.retry_after == 1.0
    account.take(40)
    with pytest.raises(TooLarge, match="101 bytes: must be at most 100"):
        account.take(101)
    account.give(100)
    assert (account.held_bytes, account.refused) == (0, 2)


def test_pressure_is_logged_once() -> None:
    account = made(100)
    account.take(100)
    assert not account.was_full()
    with pytest.raises(Overloaded):
        account.take(1)
    assert [account.was_full(), account.was_full()] == [True, False]
    account.add(1)  # an answer that is there already
    assert (account.was_full(), account.held_bytes) == (True, 101)


def test_a_claim_gives_back_what_it_holds_and_has_adopted() -> None:
    account = made(100)
    with account.claim() as claim, account.claim() as other:
        claim.take(30)
        claim.hold(70)
        claim.hold(20)
        claim.give(5)
        assert (claim.held_bytes, account.held_bytes) == (15, 15)
        with pytest.raises(Overloaded):
            claim.hold(101)
        assert account.held_bytes == 15
        other.take(30)
        claim.adopt(other)
        assert (claim.held_bytes, other.held_bytes, account.held_bytes) == (45, 0, 45)
    claim.close()
    assert (claim.held_bytes, account.held_bytes) == (0, 0)


def test_bytes_are_charged_to_the_request_of_the_context() -> None:
    charge(1000)  # nobody counts
    with made(100).claim() as claim:
        token = CLAIM.set(claim)
        charge(40)
        assert claim.held_bytes == 40
        CLAIM.reset(token)


def test_connections_of_every_kind_are_one_number() -> None:
    account = made(max_connections=3)
    kinds = [1, 1]
    account.counters += [lambda: kinds[0], lambda: kinds[1]]
    assert (account.connections, account.exceeded) == (2, False)
    kinds[1] = 3
    assert (account.connections, account.exceeded) == (4, True)


def test_the_limit_is_a_part_of_what_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_memory", lambda: 4 << 30)
    assert Account(HttpSettings()).max_bytes == 1 << 29
    monkeypatch.setattr(module, "usable_memory", lambda: 64 << 20)
    # A few bodies fit, whatever the machine has.
    assert Account(HttpSettings(max_body_size=10 << 20)).max_bytes == 40 << 20


def test_memory_is_that_of_the_container_and_of_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unlimited, machine = (resource.RLIM_INFINITY, resource.RLIM_INFINITY), usable_memory()
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "some").write_text(f"{machine // 2}\n")
    monkeypatch.setattr(module, "_CGROUP_LIMITS", (str(tmp_path / "none"), str(tmp_path / "max")))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: unlimited)
    assert usable_memory() >= machine
    monkeypatch.setattr(module, "_CGROUP_LIMITS", (str(tmp_path / "some"),))
    assert usable_memory() == machine // 2
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (machine // 3, resource.RLIM_INFINITY))
    assert usable_memory() == machine // 3


@subcases(
    ("soft", "hard", "then", "connections"),
    [
        (5000, 5000, None, 1000), (256, 5000, (1128, 5000), 1000), (256, 300, (300, 300), 172), (100, 100, (100, 100), 1),
        (256, resource.RLIM_INFINITY, (1128, resource.RLIM_INFINITY), 1000),
    ],
)  # fmt: skip
def test_there_are_no_more_connections_than_files_may_be_open(
    soft: int, hard: int, then: tuple[int, int] | None, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: done.append(limits))
    account = made(max_connections=1000)
    warning = allow_descriptors(account)
    assert (account.max_connections, done) == (connections, [] if then is None else [then])
    assert bool(warning) is (connections < 1000)
    if soft == 256 and hard == 300:  # two files for each connection
        assert "300 files (ulimit -n), so 78 connections" in allow_descriptors(
            made(max_connections=1000), others=16, each=2
        )


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
    assert second.over and second.was_full() and first.over


def test_connections_of_one_count_for_all_at_once(accounts: tuple[SharedFigures, list[SharedAccount]]) -> None:
    figures, processes = accounts
    sets = [account.connection_set() for account in processes]
    for account, connections in zip(processes, sets, strict=True):
        account.counters.append(connections.__len__)
        connections.add("first")
    assert not any(account.exceeded for account in processes)
    sets[1].add("second")
    assert all(account.exceeded for account in processes)
    for each in ("second", "second", "first"):
        sets[1].discard(each)
    assert [account.connections for account in processes] == [2, 2, 2]
    figures.clear(2)
    assert processes[0].connections == 1
    sets[1].add("passed")
    processes[1].pass_on()
    sets[1].discard("passed")  # the connection is on its way
    assert (processes[2].connections, figures.connections(1)) == (3, 1)
    sets[0].add("passed")
    figures.took(1)
    assert (processes[2].connections, figures.connections(1), figures.connections(0)) == (3, 0, 2)
    processes[1].pass_on()
    figures.clear(1)  # it has ended before that one came
    assert processes[2].connections == 3


def test_an_ended_process_holds_nothing(accounts: tuple[SharedFigures, list[SharedAccount]]) -> None:
    figures, (first, second, _) = accounts
    second.take(64 << 20)
    figures.clear(1)
    first.take(64 << 20)
    assert first.total_bytes == 64 << 20
