"""`infer_many` where one divisible request will not do: measured items, tensors, and lists longer than the line."""

import asyncio
from typing import TYPE_CHECKING, Any

from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.manager.service import Service


async def infer_each(service: "Service", items: list[Any], return_errors: bool, options: dict[str, Any]) -> list[Any]:
    """Return the answers to `items`, in order, each from a request of its own or of as many items as the line holds.

    The first error ends it and cancels the rest, or stands in its item's place with `return_errors`.
    """
    if not items:
        return []
    calls = [service.infer(item, **options) for item in items]
    try:
        answers = await asyncio.gather(*calls, return_exceptions=return_errors)
    except BaseException:
        for call in calls:
            call.cancel()
        raise
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, WeirError):
            raise answer
    return answers
