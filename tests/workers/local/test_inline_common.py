import os

import pytest

from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.messages import OBJECT, Batch, EventKind
from weir.workers.local.inline import LocalState, all_failed, not_loaded, refuse_settings
from weir.workers.settings import WorkerSettings


def test_a_state_begins_with_starting() -> None:
    state = LocalState(2)
    assert (state.index, state.state, state.pid, state.in_flight) == (2, "starting", os.getpid(), 0)


def test_only_settings_that_are_set_are_refused() -> None:
    settings = WorkerSettings(executor="thread", threads=2)
    refuse_settings(settings, ("env", "cpu_affinity"))
    with pytest.raises(SettingsError, match="threads=2: needs worker processes, not executor='thread'"):
        refuse_settings(settings, ("env", "threads"))


def test_a_failed_start_keeps_what_is_ours_and_names_the_worker_otherwise() -> None:
    ours = InvalidRequest("bad example")
    assert not_loaded(ours, "square", 1) is ours
    theirs = not_loaded(OSError("no weights"), "square", 1)
    assert isinstance(theirs, ModelError)
    assert theirs.message == "worker 1 of 'square' did not load: it raised OSError: no weights"


def test_every_entry_of_a_batch_that_broke_has_its_end() -> None:
    events = all_failed(Batch(7, [1, 2], OBJECT, OBJECT), MemoryError("too large"))
    assert (events.batch_id, events.kinds, events.final) == (7, [EventKind.ERROR] * 2, True)
    assert [output.original_type for output in events.outputs] == ["MemoryError"] * 2
    assert all_failed(Batch(7, [], OBJECT, OBJECT), MemoryError()).outputs == []
