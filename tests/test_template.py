"""A process that is forked from the one that has loaded Weir is what a program of its own would be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.served import CLEAN, COLD, MODELS, Served, start_weir, weir
from tests.template import TITLE, can_fork


def test_a_fork_has_its_own_arguments_folder_environment_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import weir, os\nclass Mine(weir.Model):\n    examples = (os.environ['MINE'],)\n    def predict(self, batch): return batch\n"
    )
    done = weir("check", "mine:Mine", env={"MINE": "a value of this run"}, cwd=tmp_path)
    assert (done.returncode, "a value of this run" in done.stdout) == (0, True), done
    assert "MINE" not in os.environ
    done = weir("serve", "nowhere:Model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("weir: ") and "nowhere" in done.stderr


def test_a_fork_loads_no_optional_library_and_has_one_thread_to_begin_with() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import template, threading; template._load();"
        "print(threading.active_count(), *sorted({'grpc', 'onnxruntime', 'tokenizers', 'torch', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_fork_is_waited_for_and_ended_as_a_process_of_subprocess() -> None:
    with Served(f"{MODELS}:Square") as served:
        served.until_ready()
        own = psutil.Process(served.process.pid)
        assert own.ppid() == os.getpid() and own.cmdline()[:4] == [sys.executable, "-m", "weir", "serve"]
        (forks,), (worker,) = {*own.children()} - {*served.children()}, served.children()
        assert TITLE in forks.cmdline() and "weir.workers.process.entry" in worker.cmdline()
        assert served.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(0.01)
        served.process.terminate()
        assert served.wait() == served.process.poll() == 0
        served.process.kill()  # does nothing
    with Served(f"{MODELS}:Square") as served:
        served.process.kill()
        assert served.wait() == -signal.SIGKILL


def test_what_only_an_interpreter_of_its_own_would_read_is_not_forked() -> None:
    assert can_fork({**CLEAN, "WEIR_API_KEY": "a"})
    assert not can_fork({**CLEAN, "PYTHONPATH": "/elsewhere"}) and not can_fork({**CLEAN, **COLD})
    process = start_weir(["--version"], {**CLEAN, **COLD})
    assert process.communicate()[0].startswith("weir ")
