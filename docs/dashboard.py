"""Makes the pictures of the dashboard in Chromium while a real server of sentence vectors gets more callers, then fewer.

dashboard.webp moves and shows the cards; dashboard.png is the whole page at the highest load.

    python -m docs.dashboard

It needs what `make test-browser` installs, and Pillow.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from io import BytesIO
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
SIZE, SHOWN = (1280, 872), (960, 654)  # pixels of the cards in the browser and in the picture
TALL = 2400  # of the window, so that the whole page is in it
CALLERS = (2, 2, 4, 24, 24, 24, 8, 2)  # one after another, each for SECONDS
SECONDS, FRAME_SECONDS = 5.0, 2.0
TEXTS = (
    "First do it",
    "then do it right",
    "then do it better, and tell those who wait for it how long it still takes",
)


def main() -> None:
    """Make the pictures."""
    from PIL import Image

    command = [sys.executable, "-m", "weir", "embed", "serve", "--port", "0", "--workers", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = next(
            found[0]
            for line in server.stdout
            if (found := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        load = threading.Thread(target=_load, args=(address,), daemon=True)
        frames = _frames(f"{address}/dashboard", load)
    finally:
        server.terminate()
        server.wait()
    frames = _from_the_busiest(frames)
    frames[0].quantize(256).save(PICTURES / "dashboard.png", optimize=True)
    first, *others = [
        frame.crop((0, 0, *SIZE)).resize(SHOWN, Image.Resampling.LANCZOS) for frame in frames
    ]
    first.save(
        PICTURES / "dashboard.webp",
        save_all=True,
        append_images=others,
        duration=600,
        loop=0,
        quality=60,
        method=6,
        minimize_size=True,
    )


def _from_the_busiest(frames: list[Any]) -> list[Any]:
    """Return the frames in a circle from the middle of the highest load on, since many see only the first."""
    most = max(CALLERS)
    middle = (CALLERS.index(most) + len(CALLERS) - CALLERS[::-1].index(most)) / 2
    start = int(len(frames) * middle / len(CALLERS))
    return frames[start:] + frames[:start]


def _load(address: str) -> None:
    for callers in CALLERS:
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=_call, args=(address, end)) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _call(address: str, end: float) -> None:
    for text in itertools.cycle(TEXTS):
        if time.monotonic() > end:
            return
        urllib.request.urlopen(
            f"{address}/encode", json.dumps({"id": 1, "texts": [text]}).encode()
        ).read()


def _frames(url: str, load: threading.Thread) -> list[Any]:
    from PIL import Image
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0] or ""
    profile = tempfile.mkdtemp()
    size = f"--window-size={SIZE[0]},{TALL}"
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        size,
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(programs[1], env={**os.environ}))
    try:
        driver.get(url)
        driver.find_element(
            "xpath", "//button[normalize-space()='1 min'] | //label[normalize-space()='1 min']"
        ).click()
        load.start()
        found = []
        while load.is_alive():
            started = time.monotonic()
            end = driver.execute_script("return document.body.getBoundingClientRect().bottom")
            picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            found.append(picture.crop((0, 0, SIZE[0], int(end))))
            load.join(max(0.0, FRAME_SECONDS - (time.monotonic() - started)))
        return found
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


if __name__ == "__main__":
    main()
