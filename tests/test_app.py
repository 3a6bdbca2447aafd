"""What is refused before anything is started, and what does not end."""

import signal
import subprocess
import sys

import pytest
from tests.served import CLEAN, MODELS

from weir.catalog.loading import make_service
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError


def test_refused_parameters_show_no_secrets() -> None:
    params = {"size": 3, "api_key": "hunter2"}
    with pytest.raises(SettingsError, match=r"params=.'size': 3, 'api_key': '[*]{3}'.: got an unexpected") as caught:
        make_service(ModelToServe("tests.served_models:Square", "square", params, [], {}), [])
    assert "hunter2" not in str(caught.value)


HANGING = """
import asyncio, sys
import weir.app
from weir.app import App, run
from weir.settings import read_settings
from weir.telemetry.logs import logging_to

weir.app.END_LIMIT = 0.1

class Hangs(App):
    async def _drain(self):
        await asyncio.Event().wait()

settings = read_settings([sys.argv[1]], {"port": ["0"], "drain_timeout": ["0.1"]}, {})
with logging_to(settings.telemetry):
    run(Hangs(settings), lambda: print("ready", flush=True))
"""


def test_a_server_that_does_not_end_leaves_behind_what_hangs_and_says_so() -> None:
    command = [sys.executable, "-c", HANGING, f"{MODELS}:Square"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "not everything ends" in log
    assert "processes=[" in log
