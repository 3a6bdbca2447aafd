from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.frontends.http.models import Square
from tests.frontends.http.servers import Serve
from tests.rings import subcases

import weir
from weir.errors import Forbidden, SettingsError, Unauthorized
from weir.protocols.access import Control, ControlSettings, is_local
from weir.serving.service import Service
from weir.testing import FakeExecutor

LOCAL = [
    None, "", "unix:", "unix:/run/weir.sock", "127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "127.0.0.1:5000",
    "ipv4:127.0.0.1:5000", "ipv6:[::1]:5000", "ipv6:%5B::1%5D:5000", "[::1]:80", "::1%lo",
]  # fmt: skip
REMOTE = [
    "10.0.0.1", "192.168.1.7:80", "2001:db8::1", "ipv4:10.0.0.1:5000", "ipv6:[2001:db8::1]:5000", "::ffff:10.0.0.1",
    "localhost", "127.0.0.1.example.com", "vsock:2:80", "0.0.0.0", "fe80::1%eth0",
]  # fmt: skip


@subcases("peer", LOCAL)
def test_who_is_on_this_machine(peer: str | None) -> None:
    assert is_local(peer)
    Control().require(peer, None)
    with pytest.raises(Forbidden):
        Control(trusts_local=False).require(peer, None)


@subcases("peer", REMOTE)
def test_who_is_not(peer: str) -> None:
    assert not is_local(peer)
    with pytest.raises(Forbidden, match="not allowed from"):
        Control().require(peer, "whatever")
    Control(ControlSettings(allow_control=True)).require(peer, None)


def with_token(tmp_path: Path, text: str = "s3cret\n") -> Control:
    file = tmp_path / "token"
    file.write_text(text)
    return Control(ControlSettings(control_token_file=str(file)))


@subcases("peer", ["127.0.0.1", "10.0.0.1", None])
def test_everybody_needs_the_token(tmp_path: Path, peer: str | None) -> None:
    control = with_token(tmp_path)
    control.require(peer, "s3cret")
    assert "s3cret" not in f"{control!r} {control.settings!r}"
    for token in (None, "", "S3cret", "s3cre", "s3cret2", "sécret"):
        with pytest.raises(Unauthorized) as refused:
            control.require(peer, token)
        assert "s3cret" not in refused.value.message and "s3cre" not in refused.value.message


def test_over_http_the_token_is_a_bearer(tmp_path: Path) -> None:
    control = with_token(tmp_path)
    for scheme in (b"Bearer", b"bearer"):
        control.require_http("10.0.0.1", [(b"authorization", scheme + b" s3cret"), (b"origin", b"https://a.example")])
    for value in (b"s3cret", b"Basic s3cret", b"Bearer other", b"Bearer \xe9"):
        with pytest.raises(Unauthorized):
            control.require_http("127.0.0.1", [(b"authorization", value)])


@subcases("name", [b"origin", b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"])
def test_pages_and_proxies_on_this_machine_speak_for_others(name: bytes) -> None:
    Control().require_http("127.0.0.1", [(b"host", b"localhost")])
    with pytest.raises(Forbidden, match="a proxy or a page"):
        Control().require_http("127.0.0.1", [(name, b"whatever")])
    Control(ControlSettings(allow_control=True)).require_http("127.0.0.1", [(name, b"whatever")])


def test_unusable_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Control(ControlSettings(control_token_file=str(tmp_path / "none")))
    for text in ("", " \n", "one\ntwo"):
        with pytest.raises(SettingsError, match="must hold one token"):
            with_token(tmp_path, text)
    with pytest.raises(SettingsError, match="set only one of them"):
        ControlSettings(allow_control=True, control_token_file="token")


def test_changing_a_policy_is_control(serve: Serve) -> None:
    server = serve(Service(Square, executor=FakeExecutor()))
    path, body = "/models/square/policy", {"energy_weight": 1}
    assert server.client.put(path, json=body).status_code == 409  # allowed, but there is nothing to change
    refused = server.client.put(path, json=body, headers={"origin": "https://evil.example"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "Forbidden")
    assert server.client.get(path, headers={"origin": "https://evil.example"}).status_code == 200


async def test_a_hosted_application_trusts_nobody_by_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    token, bearer = {"control_token_file": str(tmp_path / "token")}, {"authorization": "Bearer s3cret"}
    cases: list[tuple[dict[str, Any], dict[str, str], int]] = [
        ({}, {}, 403), ({"allow_control": True}, {}, 409), (token, {}, 401), (token, bearer, 409)
    ]  # fmt: skip
    for settings, headers, status in cases:
        app: Any = weir.asgi(Service(Square, executor=FakeExecutor()), **settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            answer = await client.put("/models/square/policy", json={"energy_weight": 1}, headers=headers)
        assert answer.status_code == status
