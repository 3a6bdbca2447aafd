from typing import Any

import pytest

from weir.errors import SettingsError
from weir.profiling.settings import ProfilingSettings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sizes": [4, 0]}, "sizes=0: must be whole numbers of rows, 1 or more"),
        ({"seconds": 0.0}, r"seconds=0.0: must be greater than 0"),
        ({"confidence": -1.0}, r"confidence=-1.0: must be a share, greater than 0 and less than 1"),
        ({"confidence": 2.0}, r"confidence=2.0: must be a share, greater than 0 and less than 1"),
        ({"power": 0.0}, r"power=0.0: must be greater than 0"),
    ],
)
def test_a_setting_that_cannot_be_says_which(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ProfilingSettings(**setting)
