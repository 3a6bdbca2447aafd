import pytest

from weir.errors import Cancelled, DeadlineExceeded, ModelCrashed, Overloaded, WeirError, WorkerLost
from weir.protocols.metrics import code_of


@pytest.mark.parametrize(
    ("kind", "code"),
    [(None, "200"), (Overloaded, "429"), (DeadlineExceeded, "408"), (WorkerLost, "503"), (ModelCrashed, "500"),
     (Cancelled, "499")],
)  # fmt: skip
def test_the_code_at_the_http_door_is_http_s(kind: type[WeirError] | None, code: str) -> None:
    assert code_of("http", kind) == code


def test_in_process_the_code_is_the_error() -> None:
    assert code_of("python", None) == "ok"
    assert code_of("python", Overloaded) == "Overloaded"
