"""System shared memory: regions that clients on this machine have registered, for inputs to be read from and outputs written to.

A region is a file in /dev/shm that its client owns. It is read and written with system calls and not mapped: a client that
shrinks its file under a mapping would end this process.
"""

import os
import re
import stat
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from weir.errors import Conflict, Forbidden, InvalidRequest, TooLarge, brief
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_binary import raw_bytes
from weir.wire.kserve_json import REGION, nowhere

FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?(?!\.\.?$)[A-Za-z0-9._-]{1,255}")
_MAX_BYTES = (1 << 63) - 1
_MAX_REGIONS = 1000

OFF = "shared memory is switched off on this server (--allow-shared-memory switches it on for callers on this machine)"


class RegionStatus(TypedDict):
    """A region of shared memory, in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class Region:
    """One region: `byte_size` bytes from `offset` on of the file that `key` names; `fd` is open on it for as long as anybody has
    the region, for a request that uses it may still be under way when it is unregistered."""

    __slots__ = ("__weakref__", "byte_size", "fd", "key", "name", "offset")

    def __init__(self, name: str, key: str, offset: int, byte_size: int, fd: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def status(self) -> RegionStatus:
        """Return what clients see of it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, byte_size: int) -> bytearray:
        """Return a copy of `byte_size` bytes from `offset` on, which must lie in it."""
        data = bytearray(byte_size)
        view, at = memoryview(data), 0
        while at < byte_size:
            count = os.preadv(self.fd, [view[at:]], self.offset + offset + at)
            if not count:
                raise self._shorter()
            at += count
        return data

    def write(self, offset: int, room: int, data: bytes | memoryview) -> None:
        """Write `data` from `offset` on, where a client has left `room` bytes for it."""
        if len(data) > room:
            raise InvalidRequest(f"shared memory region {self.name!r}: {room} bytes for an output that has {len(data)}")
        if os.fstat(self.fd).st_size < self.offset + offset + len(data):
            raise self._shorter()
        view, at = memoryview(data), 0
        while at < len(view):
            at += os.pwritev(self.fd, [view[at:]], self.offset + offset + at)

    def _shorter(self) -> InvalidRequest:
        return InvalidRequest(f"shared memory region {self.name!r}: its client has made {self.key!r} shorter")


class Regions:
    """The regions of one server. `allowed` False: there can be none. At most `max_read` bytes are read at once.

    Every refusal is a RequestError that names region, value and rule.
    """

    def __init__(self, *, allowed: bool = False, max_read: int = 16 << 20, folder: Path = FOLDER) -> None:
        self.allowed = allowed
        self._max_read = max_read
        self._folder = folder
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open the region: `byte_size` bytes from `offset` on of the shared memory object `key`."""
        self._check_allowed()
        if name in self._regions:
            raise Conflict(f"shared memory region {name!r} is already registered; unregister it first")
        if len(self._regions) >= _MAX_REGIONS:
            raise Conflict(f"shared memory region {name!r}: {_MAX_REGIONS} are registered, that is the limit")
        if not (0 <= offset <= _MAX_BYTES and 0 < byte_size <= _MAX_BYTES - offset):
            raise InvalidRequest(
                f"shared memory region {name!r}: offset={offset}, byte_size={byte_size}: must be 0 or more, and 1 or more"
            )
        fd = self._open(name, key)
        size = os.fstat(fd).st_size
        if offset + byte_size > size:
            os.close(fd)
            raise InvalidRequest(
                f"shared memory region {name!r}: bytes {offset} to {offset + byte_size}, but {key!r} has {size}"
            )
        self._regions[name] = Region(name, key, offset, byte_size, fd)

    def unregister(self, name: str = "") -> None:
        """Close the region of this name, if there is one; without a name, all."""
        self._check_allowed()
        for each in [name] if name else list(self._regions):
            self._regions.pop(each, None)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Return what there is: the region of this name, or without a name all."""
        self._check_allowed()
        regions = [self._find(name)] if name else self._regions.values()
        return [region.status() for region in regions]

    def read(self, name: str, offset: int, byte_size: int) -> bytearray:
        """Return a copy of `byte_size` bytes of a region, from `offset` on."""
        region = self.find(name, offset, byte_size)
        if byte_size > self._max_read:
            raise TooLarge(
                f"shared memory region {name!r}: {byte_size} bytes for a tensor: must be at most {self._max_read} "
                "(max_body_size)"
            )
        return region.read(offset, byte_size)

    def close(self) -> None:
        """Close all that no request uses; the others are closed when these have their ends."""
        self._regions.clear()

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise Forbidden(OFF)

    def _find(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise InvalidRequest(f"Unable to find shared memory region: {name!r}; register it first")
        return region

    def find(self, name: str, offset: int, byte_size: int) -> Region:
        """Return the region of this name, which these bytes must lie in."""
        self._check_allowed()
        region = self._find(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InvalidRequest(
                f"shared memory region {name!r}: bytes {offset} to {offset + byte_size} lie outside of its "
                f"{region.byte_size}"
            )
        return region

    def _open(self, name: str, key: str) -> int:
        if not _KEY.fullmatch(key):
            raise InvalidRequest(
                f"shared memory region {name!r}: key={brief(key)}: must be of letters, digits and . _ -, in {self._folder}"
            )
        path = self._folder / key.removeprefix("/")
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(
                f"Unable to open shared memory region: {name!r}: key={key!r}: {os.strerror(error.errno or 0)}"
            ) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidRequest(f"shared memory region {name!r}: key={key!r}: is no shared memory object")
        return fd


class Memory:
    """Shared memory as one request may use it. `check` raises Forbidden or Unauthorized if that is not at all."""

    def __init__(self, regions: Regions, check: Callable[[], None]) -> None:
        self._regions = regions
        self._check = check
        self._held: dict[str, tuple[Region, int, int]] = {}  # for outputs by name: where, from where on, and how much

    def find(self, name: str, parameters: Parameters) -> memoryview | None:
        """Return the bytes of the tensor `name` if its parameters name a region."""
        if REGION not in parameters:
            nowhere(name, parameters)  # raises if they promise binary data
            return None
        self._check()
        return memoryview(self._regions.read(*place_of(f"tensor {name!r}", parameters)))

    def hold(self, request: InferenceRequest) -> None:
        """Keep the regions that `request` wants outputs in: they may be unregistered while it is computed.

        Raises InvalidRequest for a place that is not there.
        """
        for output in request.outputs or ():
            if REGION in output.parameters:
                self._check()
                name, offset, room = place_of(f"output {output.name!r}", output.parameters)
                self._held[output.name] = self._regions.find(name, offset, room), offset, room

    def take_outputs(self, response: InferenceResponse) -> None:
        """Write those outputs into regions that the request wants there, which `hold` has kept; in `response` their parameters
        say so then.

        Raises InvalidRequest for one that does not fit.
        """
        for value in response.outputs:
            if value.name in self._held:
                region, offset, room = self._held[value.name]
                data = raw_bytes(value)
                region.write(offset, room, data)
                place: Parameters = {
                    REGION: region.name,
                    "shared_memory_byte_size": len(data),
                    "shared_memory_offset": offset,
                }
                value.parameters = {**value.parameters, **place}


def wants_regions(request: InferenceRequest) -> bool:
    """Tell whether `request` wants outputs in shared memory."""
    return any(REGION in output.parameters for output in request.outputs or ())


def place_of(what: str, parameters: Parameters) -> tuple[str, int, int]:
    """Return region, offset and size in bytes that `parameters` name. Raises InvalidRequest naming `what`."""
    region = parameters[REGION]
    if not isinstance(region, str):
        raise InvalidRequest(f"{what}: {REGION}={brief(region, 40)}: must be the name of a region")
    return (
        region,
        _size(what, "shared_memory_offset", parameters, 0),
        _size(what, "shared_memory_byte_size", parameters),
    )


def _size(what: str, name: str, parameters: Parameters, default: Any = None) -> int:
    value = parameters.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{what}: {name}={brief(value, 40)}: must be a number of bytes")
    return value
