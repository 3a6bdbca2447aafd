from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from tests.rings import subcases
from tests.workers.models import Square

from weir import Ray, Service
from weir.errors import SettingsError
from weir.policy.scaling import RANGE_RULE
from weir.workers.settings import WorkerSettings, parse_address


@subcases(
    ("text", "is_local"),
    [
        *[
            (text, True)
            for text in ("unix:/run/w.sock", "unix:w", "tcp:127.0.0.1:9000", "tcp:[::1]:0", "tcp:localhost:65535")
        ],
        *[(text, False) for text in ("tcp:0.0.0.0:9000", "tcp:10.0.0.1:1", "tcp:[::]:9", "tcp:host.example:9")],
    ],
)
def test_addresses_of_this_machine_and_those_that_others_reach(text: str, is_local: bool) -> None:
    address = parse_address(text, "x")
    assert (str(address), address.is_local) == (text, is_local)


@subcases("text", ["", "unix:", "tcp:", "tcp:host", "tcp::9", "tcp:h:65536", "tcp:h:-1", "tcp:h:²", "udp:h:9"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="must be unix:PATH or tcp:HOST:PORT"):
        parse_address(text, "--connect")
    with pytest.raises(SettingsError, match="worker_socket"):
        WorkerSettings(executor="external", worker_socket=text)


def test_a_socket_and_external_workers_go_together() -> None:
    with pytest.raises(SettingsError, match="worker_socket=None"):
        WorkerSettings(executor="external")
    with pytest.raises(SettingsError, match="worker_socket='unix:w'"):
        WorkerSettings(worker_socket="unix:w")


@subcases("address", ["auto", "10.0.0.1:6379", "[::1]:6379", "head.example:6379"])
def test_addresses_of_a_ray(address: str) -> None:
    assert WorkerSettings(executor="ray", ray_address=address).ray_address == address


@subcases("address", ["10.0.0.1", ":6379", "ray://10.0.0.1:10001", "host:port", "host:70000"])
def test_what_is_no_address_of_a_ray(address: str) -> None:
    with pytest.raises(SettingsError, match="must be HOST:PORT or auto"):
        WorkerSettings(executor="ray", ray_address=address)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("num_cpus", -1.0, "must be 0 or more"), ("num_gpus", -0.5, "must be 0 or more"),
        ("resources", {"A10": 0.0}, "must have amounts greater than 0"), ("resources", {"A10": "one"}, "must be a table"),
        ("placement", "best", "must be one of spread, pack, strict-spread"),
        ("bulk_workers", 1025, "must be 0 or more, and at most 1024"), ("threads", 1025, "must be 1 or more, and at most 1024"),
        ("worker_concurrency", 1025, "must be 1 or more, and at most 1024"),
        ("ray_runtime_env", "working_dir", "must be a JSON object"), ("ray_runtime_env", "[]", "must be a JSON object"),
    ],
)  # fmt: skip
def test_rules_of_what_workers_take(name: str, value: Any, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}=.*{rule}"):
        WorkerSettings(**{name: value})


def test_the_settings_that_weir_ray_stands_for() -> None:
    executor = Ray(workers=4, address="auto", num_gpus=0.25, resources={"A10": 1.0}, runtime_env={"working_dir": "."})
    assert WorkerSettings(**executor.settings()) == WorkerSettings(
        executor="ray", workers=4, ray_address="auto", num_gpus=0.25, resources={"A10": 1.0},
        ray_runtime_env='{"working_dir": "."}',
    )  # fmt: skip


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    with pytest.raises(SettingsError) as caught:
        Service(Square, executor=Ray(workers=2))
    assert (
        str(caught.value)
        == "executor='ray': Ray is not installed; add Weir's extra 'ray': pip install 'weir-serving[ray]'"
    )


@subcases(
    ("given", "kept", "first", "most"),
    [(1, 1, 1, 1), ("3", 3, 3, 3), ("1..16", "1..16", 1, 16), (" 0..4", "0..4", 1, 4), ("2 .. 3", "2..3", 2, 3)],
)
def test_workers_are_a_number_or_a_range(given: Any, kept: object, first: int, most: int) -> None:
    settings = WorkerSettings(workers=given)
    assert settings.workers == kept
    assert (settings.first_workers, settings.most_workers) == (first, most)
    assert (settings.scale is None) == isinstance(kept, int)
    assert replace(settings, threads=2).workers == kept


@subcases("given", [0, -1, "x", "4..2", "0", "1..5000", "5000", 5000, None])
def test_other_workers_are_refused(given: Any) -> None:
    with pytest.raises(SettingsError) as raised:
        WorkerSettings(workers=given)
    assert str(raised.value) == f"workers={given!r}: {RANGE_RULE}"


@subcases("given", [True, 1.5])
def test_workers_of_another_type_are_refused(given: Any) -> None:
    with pytest.raises(SettingsError, match=f"workers={given}: must be a whole number"):
        WorkerSettings(workers=given)


@subcases(("name", "value"), [("target_load", 0.0), ("target_load", 1.5), ("scale_to_zero_after", 0.0)])
def test_what_a_range_keeps_has_its_rules(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"{name}={value}: must be"):
        WorkerSettings(**{name: value})


TWO_KINDS: dict[str, Any] = {"workers": 3, "worker_kinds": ["large", "small"]}


def test_the_kinds_of_workers_go_round() -> None:
    workers = WorkerSettings(**TWO_KINDS)
    assert [workers.kind_of(worker) for worker in range(4)] == ["large", "small", "large", "small"]
    assert (workers.kind_names, workers.kind_numbers) == (("large", "small"), (0, 1))
    assert (WorkerSettings().kind_of(3), WorkerSettings().kind_numbers) == ("", ())


@subcases(
    ("given", "rule"),
    [
        ({"worker_kinds": ["a", "b", "c"]}, "worker_kinds=['a', 'b', 'c']: must name two kinds, one name for each worker"),
        ({"worker_kinds": ["a"]}, "worker_kinds=['a']: must name two kinds, one name for each worker"),
        ({"worker_kinds": ["a b", "c"]}, "worker_kinds=['a b', 'c']: must be names of letters, digits, - and _"),
        ({"workers": 1}, "worker_kinds=['large', 'small'], workers=1: no worker is of the kind 'small'; have more workers"),
        ({"workers": "2..3"}, "worker_kinds=['large', 'small'], workers=2..3: workers of two kinds are of a fixed number"),
        ({"device_group": "g"}, "worker_kinds=['large', 'small'], device_group='g': models that take turns have workers of one kind"),
        ({"executor": "ray"}, "worker_kinds=['large', 'small'], executor='ray': needs workers that this server starts (process, thread)"),
    ],
)  # fmt: skip
def test_kinds_that_cannot_be_are_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(SettingsError) as refused:
        WorkerSettings(**TWO_KINDS | given)
    assert str(refused.value) == rule
