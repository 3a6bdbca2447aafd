"""Every error has the code that the design gives it."""

from tests.rings import subcases

from weir import errors
from weir.frontends.http.fast.shared import Heads
from weir.wire.status import grpc_code, http_code, phrase

EXPECTED = [
    (errors.InvalidRequest, 400, "INVALID_ARGUMENT"),
    (errors.ValidationFailed, 422, "INVALID_ARGUMENT"),
    (errors.ModelNotFound, 404, "NOT_FOUND"),
    (errors.TooLarge, 413, "RESOURCE_EXHAUSTED"),
    (errors.MethodNotAllowed, 405, "UNIMPLEMENTED"),
    (errors.UnsupportedMediaType, 415, "INVALID_ARGUMENT"),
    (errors.Unsupported, 501, "UNIMPLEMENTED"),
    (errors.Conflict, 409, "ALREADY_EXISTS"),
    (errors.Unauthorized, 401, "UNAUTHENTICATED"),
    (errors.Forbidden, 403, "PERMISSION_DENIED"),
    (errors.DeadlineExceeded, 504, "DEADLINE_EXCEEDED"),
    (errors.RequestTimeout, 408, "DEADLINE_EXCEEDED"),
    (errors.Cancelled, 499, "CANCELLED"),
    (errors.Overloaded, 429, "RESOURCE_EXHAUSTED"),
    (errors.ModelNotReady, 503, "UNAVAILABLE"),
    (errors.Draining, 503, "UNAVAILABLE"),
    (errors.WorkerLost, 503, "UNAVAILABLE"),
    (errors.ModelError, 500, "INTERNAL"),
    (errors.ModelCrashed, 500, "INTERNAL"),
    (errors.SettingsError, 500, "INTERNAL"),
    (KeyError, 500, "INTERNAL"),
]


@subcases(("kind", "http", "grpc"), EXPECTED)
def test_codes_are_those_of_the_design(kind: type[Exception], http: int, grpc: str) -> None:
    assert (http_code(kind("x")), grpc_code(kind("x"))) == (http, grpc)


def test_a_subclass_has_the_codes_of_its_nearest_ancestor() -> None:
    class Mine(errors.ValidationFailed):
        pass

    assert http_code(Mine("x")) == 422


def test_every_error_is_in_the_list() -> None:
    listed = {kind for kind, _, _ in EXPECTED}
    leaves = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.WeirError) and not kind.__subclasses__()
    }
    assert leaves <= listed | {errors.ModelError}


@subcases(("status", "line"), [(499, b"499 Client Closed Request"), (599, b"599 "), (404, b"404 Not Found")])
def test_each_status_has_a_line_also_one_that_nobody_has_named(status: int, line: bytes) -> None:
    assert Heads().head(status, [], 0, close=False).startswith(b"HTTP/1.1 " + line + b"\r\n")
    assert phrase(status) == line.decode()[4:]
