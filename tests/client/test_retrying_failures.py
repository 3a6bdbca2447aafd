"""Codes and names become the classes of errors that there are in process."""

import pytest

from weir import errors
from weir.client import ConnectionLost, Unreachable
from weir.client.http_calls import HttpReply, error_of
from weir.client.retrying import error_of_code, error_of_status
from weir.protocols.status import grpc_code, kserve_code

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.WeirError) and kind is not errors.SettingsError
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_as_what_it_was(kind: type[errors.WeirError]) -> None:
    error = kind("because")
    for back in (
        error_of_status(kserve_code(error), "because", name=kind.__name__),
        error_of_code(grpc_code(error), "because", name=kind.__name__),
    ):
        assert (type(back), back.message) == (kind, "because")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, errors.InvalidRequest), (404, errors.ModelNotFound), (413, errors.TooLarge), (429, errors.Overloaded),
     (501, errors.Unsupported), (503, errors.CapacityError), (418, errors.WeirError)],
)  # fmt: skip
def test_an_error_without_a_name_is_what_its_status_stands_for(status: int, kind: type[errors.WeirError]) -> None:
    assert type(error_of_status(status, "because", name="NoSuchError")) is kind


def test_grpc_tells_a_refusal_from_a_broken_connection() -> None:
    assert type(error_of_code("UNAVAILABLE", "loading", retry_after=1.0)) is errors.CapacityError
    assert type(error_of_code("UNAVAILABLE", "failed to connect to all addresses")) is Unreachable
    assert type(error_of_code("UNAVAILABLE", "Socket closed")) is ConnectionLost
    assert type(error_of_code("RESOURCE_EXHAUSTED", "message larger than max")) is errors.TooLarge
    assert type(error_of_code("DATA_LOSS", "")) is errors.WeirError


def test_the_text_and_the_wait_are_kept() -> None:
    error = error_of(HttpReply(429, {"retry-after": "3"}, b'{"error": "the line is full"}'))
    assert isinstance(error, errors.Overloaded)
    assert (error.message, error.retry_after) == ("the line is full", 3.0)
    assert error_of(HttpReply(502, {}, b"<html>bad gateway")).message == "<html>bad gateway"
    assert error_of(HttpReply(500, {}, b'{"error": {"type": "x", "message": "inside"}}')).message == "inside"
    assert error_of(HttpReply(500, {}, b"")).message == "HTTP status 500"
