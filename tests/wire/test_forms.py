"""Forms with parts are read whole, and what is none is refused."""

import pytest

from weir.errors import InvalidRequest
from weir.wire.forms import FormPart, read_form

TYPE = 'Multipart/Form-Data; charset=utf-8; boundary="a b"'
FIELD = b'--a b\r\nContent-Disposition: form-data; name="f\xc3\xbcr"\r\nContent-Type: text/plain\r\n\r\n'
FILE = b'--a b\r\ncontent-disposition: form-data; filename="x"; name=data\r\nContent-Type: image/png \r\n\r\n'
END = b"\r\n--a b--\r\n"


def test_fields_and_files() -> None:
    body = FIELD + b"\r\n--a\r\n" + b"\r\n" + FILE + b"\0\r" + b"\r\n" + FILE.replace(b"Content-Type", b"X") + END
    parts = [FormPart("für", None, b"\r\n--a\r\n"), FormPart("data", "image/png", b"\0\r"), FormPart("data", "", b"")]
    assert read_form(TYPE, body, 4) == parts


@pytest.mark.parametrize(
    ("content_type", "body", "why"),
    [
        (
            "multipart/form-data",
            FIELD + END,
            "Content-Type 'multipart/form-data': must have a boundary, of at most 3 parts",
        ),
        (TYPE, (FIELD + b"\r\n") * 5 + END, "must have a boundary, of at most 3 parts"),
        (TYPE, FIELD + b"no end", "body: must be a form with parts that ends with its boundary"),
        (TYPE, b"--a b--", "body: must be a form with parts that ends with its boundary"),
        (TYPE, FIELD.replace(b"name", b"n" * 5000) + END, "body: the headers of a part have"),
        (TYPE, FIELD.replace(b"name", b"n") + END, "body: a part has neither a name nor a file name"),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_form(content_type, body, 3)
    assert why in raised.value.message
