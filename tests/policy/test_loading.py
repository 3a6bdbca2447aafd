"""loading.py: from the value of a setting to a policy."""

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from tests.policy.banks import bank
from tests.rings import subcases

from weir.config import parse_duration
from weir.errors import SettingsError
from weir.policy.decision import ControlLimit, FullBatches, Greedy, Policy, SizeOrDelay
from weir.policy.loading import build, largest_batch, load_policy
from weir.policy.online.adaptive import SolvedPolicy

OWN = """
from dataclasses import dataclass
from weir.policy.decision import Decision

@dataclass(frozen=True)
class Mine:
    patience: float = 0.0

    def decide(self, seen):
        return Decision(seen.waiting)

ready_made = Mine(7.0)
number = 3

class Undecided:
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with policies of a user's own, which is a module too."""
    path = tmp_path / "own_policies.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    return path


@subcases(
    ("text", "policy"),
    [
        ("greedy", Greedy()),
        ("size-or-delay", SizeOrDelay()),
        ("size-or-delay:size=32,delay=5ms", SizeOrDelay(32, 0.005)),
        ("size-or-delay:delay=0.02", SizeOrDelay(None, 0.02)),
        ("full", FullBatches()),
        ("full:16", FullBatches(16)),
        ("control-limit:8", ControlLimit(8)),
        ("control-limit:limit=8", ControlLimit(8)),
    ],
)
def test_the_grammar(text: str, policy: Policy) -> None:
    assert load_policy(text, max_batch_size=64, max_queue_delay=0.1) == policy


@subcases(
    ("value", "message"),
    [
        (
            "greed",
            "'greed': must be one of greedy, size-or-delay, full, control-limit, auto, FILE.npz, or module:Class; did you mean greedy?",
        ),
        ("no_module_so_named:X", "no rule and no module 'no_module_so_named'; the rules are greedy, size-or-delay"),
        ("json.nothing:X", "no rule and no module 'json.nothing'"),
        ("json:Nothing", "json has no 'Nothing'"),
        ("json:__doc__", "must be a class or a policy, is"),
        ("nowhere/at_all.py:X", "no file '.*nowhere/at_all.py'"),
        ("greedy:3", "'3' must be key=value; it has no settings"),
        ("control-limit", "limit must be given, as in control-limit:limit="),
        ("control-limit:0", "policy='control-limit:0': limit=0: must be 1 or more"),
        (Greedy, "must be a policy"),
        (8, "policy=8: must be a policy"),
        (None, "policy=None: must be a policy"),
    ],
)
def test_mistakes(value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_policy(value)


@subcases(
    ("value", "message"),
    [
        ("size-or-delay:size=65", "size=65 must not be greater than max_batch_size=64"),
        ("full:65", "size=65 must not be greater than max_batch_size=64"),
        ("control-limit:65", "limit=65 must not be greater than max_batch_size=64"),
        (ControlLimit(65), r"policy=ControlLimit\(limit=65\): limit=65 must not be greater than max_batch_size=64"),
        ("size-or-delay:delay=200ms", "delay=0.2 must not be greater than max_queue_delay=0.1"),
    ],
)
def test_contradictions(value: object, message: str) -> None:
    load_policy(value)
    with pytest.raises(SettingsError, match=message):
        load_policy(value, max_batch_size=64, max_queue_delay=0.1)


@subcases(
    ("text", "made"),
    [
        ("FILE:Mine", "Mine(patience=0.0)"),
        ("FILE:Mine:patience=20ms", "Mine(patience=0.02)"),
        ("own_policies:Mine:patience=3", "Mine(patience=3.0)"),
        ("own_policies:ready_made", "Mine(patience=7.0)"),
    ],
)
def test_a_file_and_a_module(text: str, made: str, own: Path) -> None:
    assert repr(load_policy(text.replace("FILE", str(own)))) == made


@subcases(
    ("text", "message"),
    [
        ("ready_made:x=3", "'x=3' cannot be passed to a policy that is already an instance"),
        ("number", "must be a class or a policy, is 3"),
        ("Undecided", r"must be a policy \(an instance with a method decide"),
        ("Mine:x=3", "no setting 'x'; it has patience"),
    ],
)
def test_what_is_no_policy_in_a_module(text: str, message: str, own: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        load_policy(f"own_policies:{text}")


@subcases(
    ("source", "message"),
    [
        ("1/0", "importing it raised ZeroDivisionError: division by zero"),
        ("import no_such_thing_at_all", "importing it raised ModuleNotFoundError: No module named 'no_such_thing"),
        ("def (", "importing it raised SyntaxError"),
    ],
)
def test_a_broken_module_says_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "broken_policies.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_policies", raising=False)
    for value in (f"{tmp_path}/broken_policies.py:X", "broken_policies:X"):
        with pytest.raises(SettingsError, match=message):
            load_policy(value)


def test_a_file_that_cannot_be_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "odd.py"
    path.write_text("")
    monkeypatch.setattr(importlib.util, "spec_from_file_location", lambda name, path: None)
    with pytest.raises(SettingsError, match="cannot be imported"):
        load_policy(f"{path}:X")


def test_entry_points(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"mine": "own_policies:Mine", "gone": "own_policies:Gone"}
    points = EntryPoints([EntryPoint(name, value, "weir.policies") for name, value in named.items()])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.select(group=group))
    assert repr(load_policy("mine")) == "Mine(patience=0.0)"
    assert repr(load_policy("mine:patience=5ms")) == "Mine(patience=0.005)"
    with pytest.raises(SettingsError, match="policy='gone': own_policies:Gone: AttributeError"):
        load_policy("gone")
    with pytest.raises(SettingsError, match=r"must be one of greedy, .*, auto, FILE\.npz, gone, mine"):
        load_policy("minne")


# Banks.


def test_a_bank_file_is_a_solved_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("square.policy.npz").write_bytes(bank().to_bytes())
    policy = load_policy("square.policy.npz", max_batch_size=8, max_queue_delay=0.1)
    assert isinstance(policy, SolvedPolicy) and policy.bank is not None
    assert policy.bank.rates.tolist() == bank().rates.tolist()
    assert isinstance(load_policy(str(tmp_path / "square.policy.npz"), max_batch_size=5), SolvedPolicy)
    first, second = load_policy(policy), load_policy(policy)  # what remembers is never shared
    assert isinstance(first, SolvedPolicy) and first.bank is policy.bank
    assert len({id(each) for each in (policy, first, second)}) == 3


@subcases(
    ("content", "message"),
    [
        (None, r"policy='no.npz': '/.*/no.npz' cannot be read: No such file or directory"),
        (b"", "policy='no.npz': must be a policy file made by `weir solve`"),
    ],
)
def test_a_file_that_is_no_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("no.npz").write_bytes(content)
    with pytest.raises(SettingsError, match=message) as caught:
        load_policy("no.npz")
    assert "\n" not in str(caught.value)
    (tmp_path / "folder.npz").mkdir(exist_ok=True)
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load_policy(f"{tmp_path}/folder.npz")


def test_a_bank_must_know_every_batch_that_it_may_be_requested() -> None:
    policy = SolvedPolicy(bank())
    load_policy(policy, max_batch_size=8)
    load_policy(policy)
    with pytest.raises(SettingsError, match="solved for batches of up to 8 rows, and max_batch_size=9; leave max_b"):
        load_policy(policy, max_batch_size=9)


def test_running_a_bank_needs_no_solver_and_no_pictures(tmp_path: Path) -> None:
    path = tmp_path / "square.policy.npz"
    path.write_bytes(bank().to_bytes())
    script = f"""
import sys
from weir.policy.loading import load_policy
from weir.policy.decision import Observation
assert "numpy" not in sys.modules
policy = load_policy({str(path)!r})
for n in range(1, 200):
    policy.decide(Observation(n * 0.001, n, 0.0005, float("inf"), n, n * 0.001, 1, 1, 8, 0.1, False))
print(*[name for name in ("scipy", "matplotlib", "asyncio") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


# grammar.py: one text form for the settings of every policy.


class Everything:
    """A class with a setting of each type, and one of none."""

    def __init__(  # type: ignore[no-untyped-def]  # one parameter is untyped on purpose
        self, count: int = 1, wait: float = 0.0, name: str = "", loud: bool = False, most: int | None = None, free=None
    ) -> None:
        if name == "boom":
            raise ValueError("boom is no name")
        self.values = (count, wait, name, loud, most, free)


def of(arguments: str | None) -> tuple[object, ...]:
    """Return what Everything was made of."""
    made: Everything = build(Everything, arguments, f"everything:{arguments}")
    return made.values


@subcases(
    ("text", "seconds"),
    [("5ms", 0.005), ("200us", 0.0002), ("1.5s", 1.5), ("0.25", 0.25), ("3", 3.0), ("1e-3s", 0.001), ("100ms", 0.1)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@subcases("text", ["", "ms", "5 minutes", "5m", "--1s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@subcases(
    ("arguments", "values"),
    [
        (None, (1, 0.0, "", False, None, None)),
        ("7", (7, 0.0, "", False, None, None)),
        ("count=7,wait=20ms", (7, 0.02, "", False, None, None)),
        ("name=x,loud=true,most=4", (1, 0.0, "x", True, 4, None)),
        ("loud=False,most=none", (1, 0.0, "", False, None, None)),
        ("free=3", (1, 0.0, "", False, None, 3)),
        ("free=3ms", (1, 0.0, "", False, None, 0.003)),
        ("free=true", (1, 0.0, "", False, None, True)),
        ("free=word", (1, 0.0, "", False, None, "word")),
    ],
)
def test_values_take_the_declared_type(arguments: str | None, values: tuple[object, ...]) -> None:
    assert of(arguments) == values


@subcases(
    ("arguments", "message"),
    [
        ("count=x", r"count='x': must be a whole number"),
        ("wait=soon", r"wait='soon': must be a number, or a duration such as 5ms"),
        ("loud=maybe", r"loud='maybe': must be true or false"),
        ("kount=3", r"no setting 'kount'; it has count, wait, name, loud, most, free"),
        ("count=3,count=4", r"count=4: count is given twice; give it once"),
        ("3,count=4", r"count=4: count is given twice"),
        ("count=3,4", r"'4' must be key=value; it has count"),
        ("name=boom", r"boom is no name"),
        ("", r"count='': must be a whole number"),
        ("count=1,", r"'' must be key=value"),
    ],
)
def test_mistakes_name_the_whole_text_and_the_rule(arguments: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        of(arguments)
    assert caught.value.message.startswith(f"policy='everything:{arguments}': ")


def limited(limit: int, *rest: int, **more: int) -> int:
    return limit


def nowhere(limit: "Nowhere") -> object:  # type: ignore[name-defined]  # noqa: F821  # that is the point
    return limit


def test_what_functions_have_for_settings() -> None:
    assert build(nowhere, "limit=3", "make:limit=3") == 3  # annotations that cannot be evaluated do not matter
    for make, arguments, message in (
        (limited, None, "limit must be given, as in make:limit="),
        (limited, "more=3", "no setting 'more'; it has limit"),  # what catches all is none
        (lambda: None, "3", "'3' must be key=value; it has no settings"),
    ):
        with pytest.raises(SettingsError, match=message):
            build(make, arguments, "make")


def test_the_largest_batch_is_that_of_the_bank_or_of_the_profile(tmp_path: Path) -> None:
    policy, profile = tmp_path / "a.policy.npz", tmp_path / "a.profile.toml"
    policy.write_bytes(bank().to_bytes())
    profile.write_text(bank().profile.to_toml())
    texts = ["greedy", "control-limit:4", str(policy), f"auto:profile={profile}"]
    assert [largest_batch(text) for text in texts] == [None, None, 8, 8]
