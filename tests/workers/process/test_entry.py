"""The first code of a worker process."""

import os
import subprocess
import sys

from weir.workers.process.entry import hurry


def test_a_process_that_is_to_end_is_no_longer_idle_for_the_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        hurry(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        process.kill()
        process.wait()
        hurry(process.pid)  # it is gone
