"""What is refused before anything is started."""

import pytest

from weir.errors import SettingsError
from weir.manager.making import make_service
from weir.manager.spec import ModelToServe


def test_refused_parameters_show_no_secrets() -> None:
    params = {"size": 3, "api_key": "hunter2"}
    with pytest.raises(SettingsError, match=r"params=.'size': 3, 'api_key': '[*]{3}'.: got an unexpected") as caught:
        make_service(ModelToServe("tests.served_models:Square", "square", params, [], {}), [])
    assert "hunter2" not in str(caught.value)
