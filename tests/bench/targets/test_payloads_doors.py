"""What a URL means."""

import pytest

from weir.bench.targets.payloads import TargetEndpoint, door_of
from weir.errors import SettingsError


@pytest.mark.parametrize(
    ("url", "door"),
    [
        ("http://localhost:8000/infer/square", TargetEndpoint("http")),
        ("http://unix:/run/weir.sock:/infer/square", TargetEndpoint("http")),
        ("http://host/v2/models/a%20b/infer", TargetEndpoint("kserve", "a b")),
        ("http://host/v2/models/sums/versions/2/infer#binary", TargetEndpoint("kserve", "sums", "2", binary=True)),
        ("http://unix:weir.sock:/v2/models/sums/infer", TargetEndpoint("kserve", "sums")),
        ("grpc://localhost:8001/sums", TargetEndpoint("grpc", "sums", "", "localhost:8001")),
        ("grpcs://[::1]:8001/sums/3", TargetEndpoint("grpc", "sums", "3", "[::1]:8001", tls=True)),
        ("ws://localhost:8000/sums", TargetEndpoint("ws", "sums", "", "localhost:8000")),
        (
            "wss://localhost:8000/sums/1#binary",
            TargetEndpoint("ws", "sums", "1", "localhost:8000", tls=True, binary=True),
        ),
    ],
)
def test_a_url_names_a_door(url: str, door: TargetEndpoint) -> None:
    assert door_of(url) == door


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("grpc://localhost/sums", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:8001", "must be like grpc://HOST:PORT/MODEL"),
        ("grpc://localhost:99999/sums", "Port out of range"),
        ("ws://localhost:8000/a/b/c", "must be like"),
        ("ws://localhost:8000/sums#raw", "only #binary may follow"),
        ("http://localhost:8000/infer/square#binary", "only #binary may follow, and only where"),
        ("grpc://localhost:8001/sums#binary", "only #binary may follow"),
    ],
)
def test_what_means_nothing_is_refused(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        door_of(url)
