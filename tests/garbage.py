"""What only the garbage collector frees."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles_of(*kinds: type) -> Iterator[None]:
    """Check that the block makes no reference cycles with objects of these `kinds`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        assert not [type(each) for each in gc.garbage if isinstance(each, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
