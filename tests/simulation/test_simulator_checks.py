from pathlib import Path
from typing import Any

import pytest

from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.simulation.simulator import simulate

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=8)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"workers": 2.5}, "workers=2.5: must be 1 or more, a whole number"),
        ({"seed": -1}, "seed=-1: must be 0 or more"),
        ({"requests": 1}, "requests=1: must be 2 or more"),
        ({"requests": 50.5}, "requests=50.5: must be 2 or more, a whole number"),
        ({"deadline": -1.0}, "deadline=-1.0: must be a number of seconds, greater than 0"),
        ({"late_after": float("nan")}, "late_after=nan: must be a number of seconds, greater than 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        simulate(PROFILE, ["greedy"], "poisson:0.5", **asked)
    assert caught.value.message == message


def test_profile_and_policies_may_be_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "it.toml"
    path.write_text(PROFILE.to_toml())
    for profile in (path, str(path)):
        compared = simulate(profile, "greedy,size-or-delay:size=8,delay=5ms", "poisson:0.5", requests=500)
        assert list(compared.outcomes) == ["greedy", "size-or-delay:size=8,delay=5ms"]
