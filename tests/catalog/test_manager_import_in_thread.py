import asyncio
import gc
import sys
import threading

import pytest

from weir.catalog.manager import IMPORT_SWITCH_INTERVAL, import_in_thread


def test_work_is_done_in_a_thread_that_lets_the_loop_go_on() -> None:
    def work() -> tuple[bool, float, bool]:
        return threading.current_thread() is threading.main_thread(), sys.getswitchinterval(), gc.isenabled()

    before = sys.getswitchinterval(), gc.isenabled()
    main, interval, collects = asyncio.run(import_in_thread(work))
    assert not main and interval == pytest.approx(IMPORT_SWITCH_INTERVAL) and not collects
    assert (sys.getswitchinterval(), gc.isenabled()) == before


def test_work_that_fails_leaves_all_as_it_was() -> None:
    def work() -> None:
        raise ValueError("no")

    before = sys.getswitchinterval(), gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        asyncio.run(import_in_thread(work))
    assert (sys.getswitchinterval(), gc.isenabled()) == before
