"""Property tests give the same examples in every run, however slow the machine."""

from hypothesis import settings

settings.register_profile("weir", deadline=None, derandomize=True)
settings.load_profile("weir")
