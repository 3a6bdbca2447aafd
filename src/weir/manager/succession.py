"""One driver takes another's place while requests come: whoever still holds the old one is answered by the new one."""

from typing import TYPE_CHECKING

from weir.messages import Request

if TYPE_CHECKING:
    from weir.manager.driver import Driver


def replace(old: "Driver", new: "Driver") -> None:
    """Have `new`, which runs, take all that comes to `old` from now on. What `old` had accepted it finishes; its `stop` waits
    for that."""
    new.may_have_blocks(old)  # a door may be receiving into one, and will submit it there
    kept: list[Request] = [*old.batcher.unsettled(), *old.outside.waiting]
    old.kept = {id(request): request for request in kept}
    old.successor = new
    old.draining = True


def latest(driver: "Driver") -> "Driver":
    """Return the one that takes what comes to `driver` now."""
    while driver.successor is not None:
        driver = driver.successor
    return driver


def heir(driver: "Driver") -> "Driver | None":
    """Return who takes what comes to `driver`, if it was replaced: its successor, or, once that has finished, its own.

    Those between are forgotten, so whoever holds an old one does not keep all that came after it.
    """
    while (next_one := driver.successor) is not None and next_one.successor is not None and next_one.finished:
        driver.successor = next_one.successor
    return driver.successor
