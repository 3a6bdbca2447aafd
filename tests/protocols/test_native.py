"""Reading heads: what a request asks for, from its head alone."""

from typing import Any

import pytest
from tests.frontends.http.models import Add, Echo, Words
from tests.rings import subcases

from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, MethodNotAllowed, ModelNotFound, TooLarge
from weir.messages import JSON
from weir.protocols import HttpSettings
from weir.protocols.native import RequestHead, content_length, read_head, read_head_for
from weir.serving.service import Service
from weir.testing import FakeExecutor


def registry_of(*models: Any, **settings: Any) -> Registry:
    return Registry([Service(model, executor=FakeExecutor(), **settings) for model in models])


def read(registry: Registry, path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> RequestHead | None:
    return read_head(registry, HttpSettings(max_body_size=1000), method, path, headers)


def required(registry: Registry, path: str, *headers: tuple[bytes, bytes]) -> RequestHead:
    head = read(registry, path, *headers)
    assert head is not None
    return head


def test_without_headers_everything_has_its_default() -> None:
    head = required(registry_of(Echo, timeout=7.0), "/infer/echo")
    assert (head.content_type, head.accept, head.timeout, head.priority, head.key) == (JSON, JSON, 7.0, 0, None)
    assert (head.undecoded, head.batch, head.explain, head.coding, head.accept_coding) == (True, False, False, "", "")


@subcases(("model", "path"), [(Echo, "/infer/echo/batch"), (Add, "/infer/add"), (Words, "/infer/words")])
def test_the_server_decodes_what_it_must_read_itself(model: Any, path: str) -> None:
    head = required(registry_of(model), path)
    assert not head.undecoded


@subcases(
    ("path", "route"),
    [
        ("/infer/echo/batch", "/infer/{model}/batch"),
        ("/inference", "/inference"),
        ("/echo", "/echo"),
        ("/a/echos", "/a/echos"),
        ("/v1/models/echo:predict", "/v1/models/{model}:predict"),
        ("/predictions/echo/1", "/predictions/{model}/1"),
    ],
)
def test_a_route_names_no_model(path: str, route: str) -> None:
    service = registry_of(Echo).get("echo")
    assert read_head_for(service, HttpSettings(), "POST", path, ()).form.route == route


def test_every_header_is_read() -> None:
    head = required(
        registry_of(Echo), "/inference", (b"x-request-timeout", b" 1.5 "), (b"x-request-priority", b"-3"),
        (b"x-batch-key", b"blue"), (b"x-explain", b"1"), (b"x-request-id", b"42"), (b"content-encoding", b"gzip"),
        (b"accept-encoding", b"zstd"), (b"content-length", b"1000"), (b"accept", b"text/html"), (b"accept", b"*/*"),
    )  # fmt: skip
    assert (head.timeout, head.priority, head.key, head.explain, head.request_id) == (1.5, -3, "blue", True, b"42")
    assert (head.coding, head.accept_coding, head.accept) == ("gzip", "zstd", JSON)


@subcases("path", ["/", "/infer", "/infer/", "/models", "/inferno/x", "", "batch", "/batch"])
def test_other_paths_are_not_ours(path: str) -> None:
    assert read(registry_of(Echo), path) is None


@subcases(
    ("length", "error"),
    [
        (b"1001", TooLarge), (b"9" * 5000, TooLarge), (b"-1", InvalidRequest), (b"+1", InvalidRequest),
        (b"", InvalidRequest), (b"1 1", InvalidRequest), ("²".encode("latin-1"), InvalidRequest),
    ],
)  # fmt: skip
def test_lengths(length: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(registry_of(Echo), "/infer/echo", (b"content-length", length))


def test_a_model_named_batch() -> None:
    registry = Registry([Service(Echo, name="batch", executor=FakeExecutor())])
    for path, batch in (("/infer/batch", False), ("/infer/batch/batch", True)):
        head = required(registry, path)
        assert (head.service.facts.name, head.batch) == ("batch", batch)


def test_the_model_is_looked_up_before_the_method() -> None:
    with pytest.raises(ModelNotFound, match="echo"):
        read(registry_of(Echo), "/infer/cube", method="GET")
    with pytest.raises(MethodNotAllowed, match="POST"):
        read(registry_of(Echo), "/infer/echo", method="GET")


@subcases(
    ("value", "seconds"),
    [
        (b"5", 5.0), (b".5", 0.5), (b"5.", 5.0), (b"1e-3", 0.001), (b"1e8", 1e8),
        *[(wrong, None) for wrong in (b"e5", b".", b"1e", b"1_000", b"0x1", b"1e9", b"1,5", b"\xd9\xa1")],
    ],
)  # fmt: skip
def test_timeouts(value: bytes, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(InvalidRequest, match="X-Request-Timeout"):
            read(registry_of(Echo), "/infer/echo", (b"x-request-timeout", value))
    else:
        assert required(registry_of(Echo), "/infer/echo", (b"x-request-timeout", value)).timeout == seconds


def test_a_length_is_written_in_digits_alone() -> None:
    lengths = {b"0": 0, b"0000123": 123, b"0" * 5000 + b"7": 7, b"9" * 40: int("9" * 19)}
    assert {value: content_length(value) for value in lengths} == lengths
    for value in (b"", b"-8", b"+8", b"0x8", b"1_0", b"1 0", b"1.0", "\u0663".encode()):
        with pytest.raises(InvalidRequest, match="must be a number of bytes"):
            content_length(value)
