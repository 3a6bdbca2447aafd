"""The settings of a measurement."""

from dataclasses import dataclass

from weir.config import POSITIVE, check, setting
from weir.errors import SettingsError


@dataclass(frozen=True)
class ProfilingSettings:
    """How thoroughly a model is measured."""

    sizes: list[int] = setting(
        [],
        "batch sizes to measure, in rows (default: up to 16, then in steps of a quarter, and the largest; edges of steps are "
        "looked for between them)",
        metavar="NUMBERS",
    )
    seconds: float = setting(
        30.0, "longest time for service times; energy, where it can be read, comes on top", rule=POSITIVE
    )
    confidence: float = setting(
        0.02, "half the width of each mean's 95 % interval, as a share of the mean, that is enough", rule=(
            lambda value: 0 < value < 1, "must be a share, greater than 0 and less than 1"
        )
    )  # fmt: skip
    power: float | None = setting(
        None, "watts that the device draws while it computes; for energy that cannot be read", rule=POSITIVE,
        metavar="WATTS",
    )  # fmt: skip
    seed: int = setting(1, "of the order of sizes and the choice of items")

    def __post_init__(self) -> None:
        check(self)
        wrong = [size for size in self.sizes if not (isinstance(size, int) and size >= 1)]
        if wrong:
            raise SettingsError(f"sizes={wrong[0]!r}: must be whole numbers of rows, 1 or more")
