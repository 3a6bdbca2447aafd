"""A page in a real browser, and a server that shows it what a test says."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette
from tests.frontends.http.servers import uvicorn_server

from weir.frontends.http.asgi import HttpEndpoint, routes_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")
PATIENCE = 20.0  # seconds to wait for what must come; the page asks once a second

_CELLS = """
return [...document.querySelectorAll(arguments[0] + " tbody tr")].map(row => [...row.children].map(cell => cell.textContent));
"""


class Page:
    """The dashboard at `url`, in a browser."""

    def __init__(self, browser: "Chrome", url: str) -> None:
        self.browser = browser
        self.url = url
        browser.get(f"{url}/dashboard")
        self.until(self.updated)

    def updated(self) -> bool:
        """Return whether the server has told it anything."""
        return self.text("#version") != ""

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return what it returns."""
        return self.browser.execute_script(script, *arguments)

    def find(self, selector: str) -> "WebElement":
        """Return the first element that `selector` finds."""
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Return the text of an element, seen or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def seen(self, selector: str) -> bool:
        """Return whether the element is shown."""
        return self.find(selector).is_displayed()

    def click(self, selector: str) -> None:
        """Click where the element is."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def rows(self, selector: str) -> list[list[str]]:
        """Return the cells of a table's rows, as texts."""
        cells: list[list[str]] = self.run(_CELLS, selector)
        return cells

    def number(self, card: str, series: str) -> float:
        """Return a number of a card; nothing is NaN."""
        text = self.text(f'#{card} [data-series="{series}"]')
        return float("nan") if text == "–" else float(text.replace(",", ""))

    def until(self, condition: Callable[[], T], what: str = "") -> T:
        """Return what `condition` returns once it is true."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.wait import WebDriverWait

        try:
            return WebDriverWait(self.browser, PATIENCE, 0.1).until(lambda _: condition())
        except TimeoutException:
            raise AssertionError(f"{what or 'it'} did not come within {PATIENCE} s") from None

    def rested(self) -> None:
        """Return when the page has shown an answer that it asked for from now on."""
        text = self.text("#moment-text")
        self.until(lambda: self.text("#moment-text") != text, "another answer")

    def emulate(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol."""
        answer: dict[str, Any] = self.browser.execute_cdp_cmd(command, arguments)
        return answer

    def prefer(self, feature: str, value: str) -> None:
        """Let the system prefer something."""
        self.emulate("Emulation.setEmulatedMedia", features=[{"name": feature, "value": value}])

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window as large as that."""
        self.emulate(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.until(lambda: self.run("return innerWidth") == width)

    def requested(self) -> list[str]:
        """Return the addresses that were asked for since this was asked last."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        """Return what the browser had to say since this was asked last: errors, and what the policy forbade."""
        return [entry["message"] for entry in self._log("browser")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        log: list[dict[str, Any]] = self.browser.get_log(kind)  # type: ignore[no-untyped-call]  # selenium has no types there
        return log


def shown(endpoints: Sequence[HttpEndpoint]) -> AbstractContextManager[str]:
    """Host an application of `endpoints`."""
    return hosted(Starlette(routes=routes_of(endpoints)))


@contextmanager
def hosted(app: Any, ws: Any = "none") -> Iterator[str]:
    """Serve the ASGI application on a free port in a thread of its own, while the block runs; give the address. `ws` is uvicorn's."""
    serving = uvicorn_server(app, lifespan="on", ws=ws)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving) as (host, port):
        yield f"http://{host}:{port}"
