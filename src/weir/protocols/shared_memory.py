"""System shared memory: regions that clients on this machine register, from which inputs are read and to which outputs are written.

This is Triton's extension "system shared memory" (https://github.com/triton-inference-server/server, docs/protocol/extension_shared_memory.md).
A region is part of a file in /dev/shm that belongs to its client. The server reads and writes it with system calls and does not map it: a client that
shortened a mapped file would crash this process.
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
    """One region: `byte_size` bytes from `offset` on of the file that `key` names.

    The file descriptor `fd` is closed when nothing refers to the region any more: a request may still use a region that has been unregistered.
    """

    __slots__ = ("__weakref__", "byte_size", "fd", "key", "name", "offset")

    def __init__(self, name: str, key: str, offset: int, byte_size: int, fd: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.byte_size = byte_size
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    def status(self) -> RegionStatus:
        """Return the description that clients see."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}

    def read(self, offset: int, byte_size: int) -> bytearray:
        """Return a copy of `byte_size` bytes from `offset` on, which must lie in the region. Raises InvalidRequest if the file has become shorter."""
        data = bytearray(byte_size)
        view, at = memoryview(data), 0
        while at < byte_size:
            count = os.preadv(self.fd, [view[at:]], self.offset + offset + at)
            if not count:
                raise self._shorter()
            at += count
        return data

    def write(self, offset: int, room: int, data: bytes | memoryview) -> None:
        """Write `data` from `offset` on. Raises InvalidRequest if it is longer than `room` bytes, or if the file has become shorter."""
        if len(data) > room:
            raise InvalidRequest(f"shared memory region {self.name!r}: {room} bytes for an output that has {len(data)}")
        if os.fstat(self.fd).st_size < self.offset + offset + len(data):
            raise self._shorter()
        view, at = memoryview(data), 0
        while at < len(view):
            at += os.pwritev(self.fd, [view[at:]], self.offset + offset + at)

    def _shorter(self) -> InvalidRequest:
        return InvalidRequest(f"shared memory region {self.name!r}: its client shrank {self.key!r}")


class Regions:
    """The regions of one server. If `allowed` is False, no region can be registered. A tensor may have at most `max_read` bytes.

    Every error is a RequestError that names the region, the value and the rule.
    """

    def __init__(self, *, allowed: bool = False, max_read: int = 16 << 20, folder: Path = FOLDER) -> None:
        self.allowed = allowed
        self._max_read = max_read
        self._folder = folder
        self._regions: dict[str, Region] = {}
        # Unregistered, but a request that is under way writes there: as with Triton, they are listed until it ends.
        self._leaving: weakref.WeakValueDictionary[str, Region] = weakref.WeakValueDictionary()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open the region: `byte_size` bytes from `offset` on of the shared memory object `key`."""
        self._check_allowed()
        if name in self._regions:
            raise Conflict(f"shared memory region {name!r} is already registered; unregister it first")
        if len(self._regions) >= _MAX_REGIONS:
            raise Conflict(f"shared memory region {name!r}: {_MAX_REGIONS} are registered, that is the limit")
        if not (0 <= offset <= _MAX_BYTES and 0 < byte_size <= _MAX_BYTES - offset):
            raise InvalidRequest(
                f"shared memory region {name!r}: offset={offset}, byte_size={byte_size}: offset must be at least 0 and byte_size at least 1"
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
        """Close the region of this name, if there is one; without a name, all. One that a request uses is closed when the request ends."""
        self._check_allowed()
        for each in [name] if name else list(self._regions):
            if each in self._regions:
                self._leaving[each] = self._regions.pop(each)

    def status(self, name: str = "") -> list[RegionStatus]:
        """Describe the region of this name; without a name, all regions, also those that requests still use."""
        self._check_allowed()
        used = {**self._leaving, **self._regions}
        regions = [used[name] if name in used else self._find(name)] if name else used.values()
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
        """Forget all regions. A region that a request uses is closed when the request ends."""
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
        """Return the region of this name. Raises InvalidRequest unless `byte_size` bytes from `offset` on lie in it."""
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
    """The shared memory of one request. `check` raises Forbidden or Unauthorized if its caller may not use shared memory."""

    def __init__(self, regions: Regions, check: Callable[[], None]) -> None:
        self._regions = regions
        self._check = check
        self._held: dict[str, tuple[Region, int, int]] = {}  # by name of an output: region, offset and room in bytes

    def find(self, name: str, parameters: Parameters) -> memoryview | None:
        """Return the bytes of the input tensor `name` if its parameters name a region, else None."""
        if REGION not in parameters:
            nowhere(name, parameters)  # raises if the parameters announce binary data
            return None
        self._check()
        return memoryview(self._regions.read(*place_of(f"tensor {name!r}", parameters)))

    def hold(self, request: InferenceRequest) -> None:
        """Keep the regions for the outputs of `request`, because they may be unregistered while the model computes.

        Raises InvalidRequest for a region that does not exist or is too small.
        """
        for output in request.outputs or ():
            if REGION in output.parameters:
                self._check()
                name, offset, room = place_of(f"output {output.name!r}", output.parameters)
                self._held[output.name] = self._regions.find(name, offset, room), offset, room

    def take_outputs(self, response: InferenceResponse) -> None:
        """Write each output for which `hold` has kept a region into that region, and note the place in the output's parameters in `response`.

        Raises InvalidRequest for an output that does not fit.
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
    """Return whether `request` wants any output in shared memory."""
    return any(REGION in output.parameters for output in request.outputs or ())


def place_of(what: str, parameters: Parameters) -> tuple[str, int, int]:
    """Return the region, the offset and the size in bytes that `parameters` state. Raises InvalidRequest naming `what`, the value and the rule."""
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
