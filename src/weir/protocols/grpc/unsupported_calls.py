"""The calls that are known and not offered, and why; a function of the call's name each."""

from typing import Any

from weir.errors import Unsupported
from weir.protocols.grpc.call import Call
from weir.protocols.grpc.metadata_calls import filled


async def CudaSharedMemoryStatus(asked: Any, call: Call) -> Any:
    """List no regions: there can be none."""
    return filled("CudaSharedMemoryStatusResponse", {})


async def CudaSharedMemoryRegister(asked: Any, call: Call) -> Any:
    """Refuse: inputs and outputs go through the arena, in the memory of the machine."""
    raise Unsupported("CUDA shared memory is not offered; system shared memory is")


async def CudaSharedMemoryUnregister(asked: Any, call: Call) -> Any:
    """Close all of no regions."""
    return filled("CudaSharedMemoryUnregisterResponse", {})


async def TraceSetting(asked: Any, call: Call) -> Any:
    """Refuse: what is traced is said when the server starts."""
    raise Unsupported("trace settings cannot be asked or changed by a call: they are said when the server starts")


async def LogSettings(asked: Any, call: Call) -> Any:
    """Refuse: what is logged is said when the server starts."""
    raise Unsupported("log settings cannot be asked or changed by a call: they are said when the server starts")
