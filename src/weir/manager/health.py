"""The deep health check: the model's own examples, through the same line and workers as everybody's requests."""

import asyncio
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import msgspec

from weir.errors import WeirError
from weir.model import Example

if TYPE_CHECKING:
    from weir.manager.service import Service


async def run_examples(service: "Service") -> dict[str, Any]:
    """Run every example of the model and compare where the answer is known.

    Returns {"healthy", "model", "examples": [{"ok", "seconds", "error"}, ...]}; without examples it is healthy if it is
    ready. A model that is not ready is not healthy, and `reason` says why.
    """
    examples = [each if isinstance(each, Example) else Example(each) for each in service.model.examples]
    results = await asyncio.gather(*[_run(service, example) for example in examples])
    healthy = service.ready and all(result["ok"] for result in results)
    return {"healthy": healthy, "model": service.name, "reason": service.not_ready_reason, "examples": results}


async def _run(service: "Service", example: Example) -> dict[str, Any]:
    started = service.now()
    error = ""
    try:
        answer: Any = (
            [part async for part in service.infer_stream(example.item)]
            if service.streaming
            else await service.infer(example.item)
        )
    except WeirError as failure:
        error = f"{type(failure).__name__}: {failure.message}"
    else:
        if example.expected is not ... and not same(answer, example.expected):
            error = f"expected {example.expected!r:.200}, got {answer!r:.200}"
    return {"ok": not error, "seconds": service.now() - started, "error": error}


def same(answer: Any, expected: Any) -> bool:
    """Tell whether an answer is the expected one; numbers within rounding, arrays and lists element by element, values of
    a declared type field by field."""
    answer, expected = _plain(answer), _plain(expected)
    if isinstance(expected, dict):
        return (
            isinstance(answer, dict)
            and answer.keys() == expected.keys()
            and all(same(answer[key], expected[key]) for key in expected)
        )
    if isinstance(expected, (str, bytes)) or expected is None:
        return bool(answer == expected)
    if isinstance(expected, (list, tuple)):
        return isinstance(answer, (list, tuple)) and len(answer) == len(expected) and all(map(same, answer, expected))
    if isinstance(expected, float) and isinstance(answer, (int, float)):
        return math.isclose(answer, expected, rel_tol=1e-4, abs_tol=1e-6) or (
            math.isnan(expected) and math.isnan(answer)
        )
    return bool(answer == expected)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value
