"""Who may call a server at all: anybody, or only who sends its API key.

With a key every door asks for it, before it looks at what is asked. Open remains what says whether the server lives and is ready.
"""

import base64
import binascii
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from weir.errors import SettingsError, Unauthorized
from weir.fields import check, setting
from weir.protocols.control import Control, bearer_in
from weir.protocols.origin_check import allowed

Headers = Iterable[tuple[bytes, bytes]]

_RULE = "must be printable ASCII without spaces"


@dataclass(frozen=True)
class AccessSettings:
    """Who may call the server."""

    api_key: str | None = setting(
        None, "key that every caller must send; whoever lists processes sees a flag, so say it as the variable or in a file",
        metavar="KEY", secret=True,
    )  # fmt: skip
    api_key_file: str | None = setting(
        None, "file with the keys, one a line, of which every caller must send one", metavar="PATH"
    )

    def __post_init__(self) -> None:
        check(self)
        if self.api_key is not None and not _is_key(self.api_key):
            raise SettingsError(f"api_key: {_RULE}; what was said is not shown")
        if self.api_key is not None and self.api_key_file is not None:
            raise SettingsError(
                f"api_key, api_key_file={self.api_key_file!r}: say one of them; the file may have several"
            )


class Access:
    """Decides who may call. Raises SettingsError for a file of keys that cannot be used.

    Who may control the server by its token may call it by that too: a call has room for one of them.
    """

    def __init__(self, settings: AccessSettings | None = None, control: Control | None = None) -> None:
        settings = settings or AccessSettings()
        path = settings.api_key_file
        keys = [settings.api_key] if settings.api_key is not None else [] if path is None else read_keys(path)
        self._digests = [_digest(key) for key in keys]
        self._control = control

    @property
    def required(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._digests)

    def require(self, key: str | None) -> None:
        """Return if a call with this key may go on. Raises Unauthorized. Takes as long for every key that is not one."""
        if not self.required:
            return
        if key is not None:
            given = _digest(key)
            known = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(known) or (self._control is not None and self._control.knows(key)):
                return
        said = "came without it" if key is None else "came with another one"
        raise Unauthorized(f"this server asks for its API key (Authorization: Bearer KEY), but the call {said}")

    def require_http(self, headers: Headers) -> None:
        """Do the same for a request with these headers, names in lower case.

        Browsers, which know no keys, may send it as the password of Basic authentication; not for pages of other origins, for they send it
        whoever makes them call.
        """
        if self.required:
            said = list(headers)
            token = bearer_in(said)
            self.require(_password_in(said) if token is None else token)


def read_keys(path: str) -> list[str]:
    """Return the keys in a file. Raises SettingsError if there is none, or one cannot be sent."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise SettingsError(f"api_key_file={path!r}: cannot be read: {error.strerror}") from None
    keys = {place: line.strip().decode("latin-1") for place, line in enumerate(lines, start=1) if line.strip()}
    if not keys:
        raise SettingsError(f"api_key_file={path!r}: must hold a key, or several, one a line")
    for place, key in keys.items():
        if not _is_key(key):
            raise SettingsError(f"api_key_file={path!r}: line {place}: {_RULE}")
    return list(keys.values())


def _is_key(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)


def _digest(key: str) -> bytes:
    """Digests are of one length, so to compare them does not tell how long a key is."""
    return sha256(key.encode("utf-8", "backslashreplace")).digest()


def _password_in(headers: list[tuple[bytes, bytes]]) -> str | None:
    said = dict(headers)
    value = said.get(b"authorization", b"")
    if value[:6].lower() != b"basic ":
        return None
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not allowed(origins, said.get(b"host", b"").decode("latin-1"), ()):
        return None
    try:
        return base64.b64decode(value[6:].strip(), validate=True).decode("latin-1").partition(":")[2]
    except binascii.Error:
        return None
