"""Every error has the code that the design gives it."""

from tests.rings import subcases

from weir import errors
from weir.frontends.http.fast.shared import Heads
from weir.wire.status import error_of_grpc, grpc_code, http_code, phrase

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
    (type("Mine", (errors.ValidationFailed,), {}), 422, "INVALID_ARGUMENT"),
]


@subcases(("kind", "http", "grpc"), EXPECTED)
def test_codes_are_those_of_the_design(kind: type[Exception], http: int, grpc: str) -> None:
    assert (http_code(kind("x")), grpc_code(kind("x"))) == (http, grpc)


def test_every_error_is_in_the_list() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WeirError)]
    assert {kind for kind in kinds if not kind.__subclasses__()} <= {kind for kind, _, _ in EXPECTED}


@subcases(
    ("code", "for_now", "kind"),
    [
        ("RESOURCE_EXHAUSTED", True, errors.Overloaded),
        ("RESOURCE_EXHAUSTED", False, errors.TooLarge),  # sending it again would not help
        ("UNAVAILABLE", True, errors.CapacityError),
        ("UNAVAILABLE", False, errors.CapacityError),
        ("INVALID_ARGUMENT", True, errors.InvalidRequest),
        ("INTERNAL", False, errors.ModelError),
        ("ABORTED", False, errors.WeirError),
    ],
)
def test_what_a_client_takes_a_status_of_grpc_for(code: str, for_now: bool, kind: type[Exception]) -> None:
    assert error_of_grpc(code, for_now=for_now) is kind


@subcases(("status", "line"), [(499, b"499 Client Closed Request"), (599, b"599 "), (404, b"404 Not Found")])
def test_each_status_has_a_line_also_one_that_nobody_has_named(status: int, line: bytes) -> None:
    assert Heads().head(status, [], 0, close=False).startswith(b"HTTP/1.1 " + line + b"\r\n")
    assert phrase(status) == line.decode()[4:]
