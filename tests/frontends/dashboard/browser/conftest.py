"""One browser for all tests of a file."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chrome]":
    """Chromium without a window, and a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium")
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Nothing but Chromium is to be asked, and that on this machine: selenium would look for a driver elsewhere.
    driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver"), env={**os.environ}))
    try:
        yield driver
    finally:
        driver.quit()


def _program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is not installed: make test-browser installs it"
    return str(Path(found))
