"""Forms with parts (RFC 7578), which lie in memory: files, and fields next to them."""

import re
from typing import NamedTuple

from weir.errors import InvalidRequest, brief

MULTIPART = "multipart/form-data"
_LONGEST_HEAD = 4096  # bytes of the headers of one part
_BOUNDARY = re.compile(r';\s*boundary="?([^";]+)', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:(.*)", re.IGNORECASE | re.MULTILINE)
_TYPE = re.compile(rb"^content-type:(.*)", re.IGNORECASE | re.MULTILINE)
_NAME, _FILE = (re.compile(rb";\s*" + each, re.IGNORECASE) for each in (rb'name="?([^";\r]+)', rb"filename\*?="))


class FormPart(NamedTuple):
    """A part of a form. `content_type` is that of a file; None for a field."""

    name: str
    content_type: str | None
    data: bytes


def read_form(content_type: str, body: bytes, most: int) -> list[FormPart]:
    """Return the parts of a form, at most `most`. Raises InvalidRequest."""
    boundary = _BOUNDARY.search(content_type)
    between = b"\r\n--" + (boundary[1].strip().encode("latin-1") if boundary else b"")
    if not boundary or body.count(between) > most:
        rule = f"must have a boundary, of at most {most} parts"
        raise InvalidRequest(f"Content-Type {brief(content_type)}: {rule}")
    parts = (b"\r\n" + body).split(between)
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise InvalidRequest("body: must be a form with parts that ends with its boundary")
    return [_part(each) for each in parts[1:-1]]


def _part(part: bytes) -> FormPart:
    head, _, data = part.partition(b"\r\n\r\n")
    if len(head) > _LONGEST_HEAD:
        rule = f"the headers of a part have {len(head)} bytes, must have at most {_LONGEST_HEAD}"
        raise InvalidRequest(f"body: {rule}")
    disposition, media = _DISPOSITION.search(head), _TYPE.search(head)
    stated = disposition[1] if disposition else b""
    found, is_file = _NAME.search(stated), _FILE.search(stated)
    if not (found or is_file):
        raise InvalidRequest("body: a part has neither a name nor a file name")
    kind = media[1].decode("latin-1").strip() if media else ""
    return FormPart(found[1].decode("utf-8", "replace") if found else "", kind if is_file else None, data)
