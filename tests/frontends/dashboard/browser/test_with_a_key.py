"""A server that asks for a key shows its dashboard to a browser that sends it as a password."""

from typing import TYPE_CHECKING

import httpx
import pytest
from tests.frontends.dashboard.browser.site import Page
from tests.served import MODELS, serving

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

KEY = "k-1234567890"

pytestmark = pytest.mark.browser


def test_a_browser_with_the_password_sees_it_live(browser: "Chrome") -> None:
    with serving(f"{MODELS}:Square", env={"WEIR_API_KEY": KEY}) as (served, _):
        browser.get(f"{served.url}/dashboard")
        assert not browser.find_elements("css selector", "#version")  # it asks for a password
        browser.get(served.url.replace("http://", f"http://me:{KEY}@") + "/health/deep")  # as somebody who types it
        page = Page(browser, served.url)
        for number in range(3):
            httpx.post(f"{served.url}/infer/square", json=number, headers={"Authorization": f"Bearer {KEY}"})
        page.until(lambda: page.number("requests", "answered") > 0, "the calls")
