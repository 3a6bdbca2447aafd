import pytest

from weir.errors import SettingsError
from weir.workers.settings import WorkerSettings, parse_address


@pytest.mark.parametrize(
    "text", ["unix:/run/w.sock", "unix:w", "tcp:127.0.0.1:9000", "tcp:[::1]:0", "tcp:localhost:65535"]
)
def test_addresses_of_this_machine(text: str) -> None:
    address = parse_address(text, "x")
    assert str(address) == text
    assert address.is_local


@pytest.mark.parametrize("text", ["tcp:0.0.0.0:9000", "tcp:10.0.0.1:1", "tcp:[::]:9", "tcp:host.example:9"])
def test_addresses_that_others_reach(text: str) -> None:
    assert not parse_address(text, "x").is_local


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp:", "tcp:host", "tcp::9", "tcp:h:65536", "tcp:h:-1", "tcp:h:²", "udp:h:9"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="must be unix:PATH or tcp:HOST:PORT"):
        parse_address(text, "--connect")
    with pytest.raises(SettingsError, match="worker_socket"):
        WorkerSettings(executor="external", worker_socket=text)


def test_a_socket_and_external_workers_go_together() -> None:
    with pytest.raises(SettingsError, match="worker_socket=None"):
        WorkerSettings(executor="external")
    with pytest.raises(SettingsError, match="worker_socket='unix:w'"):
        WorkerSettings(worker_socket="unix:w")
