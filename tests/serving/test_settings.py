from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.policy.banks import bank
from tests.rings import subcases

from weir import Model, SettingsError, SolvedPolicy
from weir.serving import ServiceSettings, compose


class Plain(Model):
    pass


class Particular(Model):
    max_batch_size = 8
    workers = 2
    max_queue_delay = 0.5


def test_the_model_overrides_the_defaults_and_arguments_override_the_model() -> None:
    plain, own = compose(Plain, {}), compose(Particular, {"workers": 3, "timeout": 1.5})
    assert (plain.batching.max_batch_size, plain.workers.workers, plain.service.timeout) == (64, 1, 30.0)
    assert (own.batching.max_batch_size, own.batching.max_queue_delay) == (8, 0.5)
    assert (own.workers.workers, own.service.timeout) == (3, 1.5)


def test_batches_are_as_large_as_a_solved_policy_knows_unless_stated(tmp_path: Path) -> None:
    policy, profile = tmp_path / "a.policy.npz", tmp_path / "a.profile.toml"
    policy.write_bytes(bank().to_bytes())
    profile.write_text(bank().profile.to_toml())
    solved: list[Any] = [str(policy), SolvedPolicy(bank()), f"auto:profile={profile}"]
    assert [compose(Plain, {"policy": each}).batching.max_batch_size for each in solved] == [8, 8, 8]
    assert compose(Plain, {"policy": str(policy), "max_batch_size": 9}).batching.max_batch_size == 9  # refused later


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"max_batchsize: unknown setting; did you mean max_batch_size\?"):
        compose(Plain, {"max_batchsize": 1})
    with pytest.raises(SettingsError, match=r"zzz: unknown setting; the settings are arena_bytes, backpressure, "):
        compose(Plain, {"zzz": 1})


def test_a_value_against_its_rule_is_refused() -> None:
    with pytest.raises(SettingsError, match="drain_timeout=-1: must be 0 or more"):
        ServiceSettings(drain_timeout=-1)
    with pytest.raises(SettingsError, match="workers=0: must be 1 or more"):
        compose(Plain, {"workers": 0})


@subcases(
    ("settings", "says"),
    [
        ({"max_batch_size": "3"}, "max_batch_size='3': must be a whole number"),
        ({"max_batch_size": True}, "max_batch_size=True: must be a whole number"),
        ({"timeout": "1"}, "timeout='1': must be a number"),
        ({"backpressure": 1}, "backpressure=1: must be true or false"),
        ({"executor": 3}, "executor=3: must be text"),
        (
            {"cpu_affinity": ["a"]},
            "cpu_affinity=\\['a'\\]: must be a list, each element a list, each element a whole number",
        ),
        ({"env": [3]}, "env=\\[3\\]: must be a list, each element a table"),
        ({"env": {"A": 3}}, "env=.*: must be a list, each element a table"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_type(settings: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        compose(Plain, settings)


def test_one_value_for_all_workers_needs_no_list() -> None:
    workers = compose(Plain, {"env": {"A": "b"}, "cpu_affinity": [0, 1]}).workers
    assert (workers.env, workers.cpu_affinity) == ([{"A": "b"}], [[0, 1]])
    assert compose(Plain, {"env": {}, "cpu_affinity": []}).workers.env == []
    assert compose(Plain, {"max_batch_size": numpy.int64(3), "timeout": 2}).service.timeout == 2


@subcases(
    "given", [{"num_gpus": 1.0}, {"ray_address": "auto"}, {"num_cpus": 0.5}, {"resources": {"A10": 1.0}}, {"placement": "pack"}]
)  # fmt: skip
def test_what_only_ray_reads_is_refused_elsewhere(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(SettingsError, match=f"{name}=.*, executor='process': only Ray reads {name}"):
        compose(Plain, given)
    assert getattr(compose(Plain, {**given, "executor": "ray"}).workers, name) == given[name]
