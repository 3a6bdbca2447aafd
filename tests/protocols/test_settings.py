"""The settings of the HTTP frontend hold their rules."""

from typing import Any

import pytest

from weir.errors import SettingsError
from weir.protocols import HttpSettings


def test_the_defaults_are_good() -> None:
    assert HttpSettings().port == 8000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": 65536}, "port=65536"), ({"port": -1}, "port=-1"), ({"max_body_size": 0}, "max_body_size"),
        ({"idle_timeout": 0.0}, "idle_timeout"), ({"tls_keyfile": "key.pem"}, "needs tls_certfile"),
        ({"port": "http"}, "port='http'"),
    ],
)  # fmt: skip
def test_a_value_against_its_rule_is_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        HttpSettings(**settings)
