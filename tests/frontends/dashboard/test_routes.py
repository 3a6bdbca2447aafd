import asyncio
import re

import httpx
import pytest
from starlette.applications import Starlette
from tests.frontends.dashboard.kit import Scene, Square

import weir
from weir.frontends.dashboard.routes import assets, make_dashboard
from weir.frontends.http.endpoints import routes_of
from weir.testing import FakeExecutor

ABROAD = re.compile(r"""(?:src|href|url|import|from)\s*[=(]?\s*["'(]?\s*(?:https?:)?//""")


def get(app: object, *paths: str) -> list[httpx.Response]:
    async def call() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]  # any ASGI application
        async with httpx.AsyncClient(transport=transport, base_url="http://weir") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(call())


@pytest.fixture
def page() -> Starlette:
    scene = Scene("square")
    return Starlette(routes=routes_of(make_dashboard(scene.registry, scene.metrics).endpoints))


def test_every_part_of_the_page_is_ours_and_kept_apart_from_strangers(page: Starlette) -> None:
    paths = [f"/dashboard/{name}" for name in assets() if name != "page.html"]
    assert {"/dashboard/main.js", "/dashboard/style.css"} < set(paths)
    for answer in get(page, "/dashboard", *paths):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not ABROAD.search(answer.text), answer.url
        assert "innerHTML" not in answer.text


def test_the_page_has_neither_script_nor_style_of_its_own(page: Starlette) -> None:
    (answer,) = get(page, "/dashboard")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", answer.text)
    loaded = set(re.findall(r'(?:src|href)="([^"]+)"', answer.text))
    assert {"dashboard/main.js", "dashboard/style.css"} <= loaded
    assert all(
        part.status_code == 200 for part in get(page, *[f"/{path}" for path in loaded if path.startswith("dashboard/")])
    )


def test_scripts_import_only_what_is_there(page: Starlette) -> None:
    scripts = [name for name in assets() if name.endswith(".js")]
    for answer in get(page, *[f"/dashboard/{name}" for name in scripts]):
        assert answer.headers["content-type"].startswith("text/javascript")
        assert set(re.findall(r'from "\./([^"]+)"', answer.text)) <= set(scripts)
        assert answer.text.count("\n") < 400


@pytest.mark.parametrize("query", ["", "?since=-1", "?since=x&life=%00", "?since=99999999999999999999"])
def test_the_data_is_json_whatever_the_query(page: Starlette, query: str) -> None:
    (answer,) = get(page, f"/dashboard/data{query}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["samples"] == []


def test_a_server_that_counts_nothing_says_so() -> None:
    scene = Scene("square")
    app = Starlette(routes=routes_of(make_dashboard(scene.registry, None).endpoints))
    (answer,) = get(app, "/dashboard/data")
    assert answer.json()["server"]["counted"] is False


def test_an_application_under_another_server_has_the_page() -> None:
    hosted = weir.asgi(Square, executor=FakeExecutor(list))
    page, index, openapi = get(hosted, "/dashboard", "/", "/openapi.json")
    assert page.text.startswith("<!doctype html>")
    described = {"/dashboard", "/dashboard/data"}
    assert described <= set(index.json()["pages"]) and described <= set(openapi.json()["paths"])


def test_nobody_writes_to_it(page: Starlette) -> None:
    async def post() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://weir") as client:
            return (await client.post("/dashboard/data")).status_code

    assert asyncio.run(post()) == 405
