import gc
import sys
import threading

import pytest

from weir.catalog.manager import IMPORT_SWITCH_INTERVAL, import_in_thread


async def test_work_is_done_in_a_thread_that_lets_the_loop_go_on() -> None:
    def work() -> tuple[bool, float, bool]:
        return threading.current_thread() is threading.main_thread(), sys.getswitchinterval(), gc.isenabled()

    before = sys.getswitchinterval(), gc.isenabled()
    main, interval, collects = await import_in_thread(work)
    assert not main and interval == pytest.approx(IMPORT_SWITCH_INTERVAL) and not collects
    assert (sys.getswitchinterval(), gc.isenabled()) == before
    with pytest.raises(ZeroDivisionError):
        await import_in_thread(lambda: 1 // 0)
    assert (sys.getswitchinterval(), gc.isenabled()) == before
