"""loading.py: from the value of a setting to a policy."""

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from tests.policy.banks import bank

from weir.errors import SettingsError
from weir.policy import loading
from weir.policy.decision import Policy
from weir.policy.loading import load_policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import ControlLimit, FullBatches, Greedy, SizeOrDelay

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
def own(tmp_path: Path) -> Path:
    """A file with policies of a user's own."""
    path = tmp_path / "own_policies.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
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


def test_an_instance_is_taken_as_it_is() -> None:
    policy = ControlLimit(3)
    assert load_policy(policy) is policy


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "greed",
            "policy='greed': must be one of greedy, size-or-delay, full, control-limit, auto, FILE.npz, or module:Class",
        ),
        (
            "no_module_of_that_name:X",
            "no rule and no module 'no_module_of_that_name'; the rules are greedy, size-or-delay",
        ),
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


@pytest.mark.parametrize(
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


def test_a_file(own: Path) -> None:
    assert type(load_policy(f"{own}:Mine")).__name__ == "Mine"
    assert repr(load_policy(f"{own}:Mine:patience=20ms")) == "Mine(patience=0.02)"


def test_a_module(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own.parent)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    assert repr(load_policy("own_policies:Mine:patience=3")) == "Mine(patience=3.0)"
    assert repr(load_policy("own_policies:ready_made")) == "Mine(patience=7.0)"
    with pytest.raises(SettingsError, match="'x=3' cannot be given to what is already a policy"):
        load_policy("own_policies:ready_made:x=3")
    with pytest.raises(SettingsError, match="must be a class or a policy, is 3"):
        load_policy("own_policies:number")
    with pytest.raises(SettingsError, match=r"must be a policy \(an instance with a method decide"):
        load_policy("own_policies:Undecided")
    with pytest.raises(SettingsError, match="no setting 'x'; it has patience"):
        load_policy("own_policies:Mine:x=3")


@pytest.mark.parametrize(
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
    monkeypatch.syspath_prepend(own.parent)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    group = loading.ENTRY_POINTS
    points = EntryPoints(
        [EntryPoint("mine", "own_policies:Mine", group), EntryPoint("gone", "own_policies:Gone", group)]
    )
    monkeypatch.setattr(loading, "entry_points", lambda group: points.select(group=group))
    assert repr(load_policy("mine")) == "Mine(patience=0.0)"
    assert repr(load_policy("mine:patience=5ms")) == "Mine(patience=0.005)"
    with pytest.raises(SettingsError, match="policy='gone': importing it raised AttributeError"):
        load_policy("gone")
    with pytest.raises(
        SettingsError, match=r"must be one of greedy, size-or-delay, full, control-limit, auto, FILE\.npz, gone, mine"
    ):
        load_policy("minne")


# Banks.


def test_a_bank_file_is_a_solved_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("square.policy.npz").write_bytes(bank().to_bytes())
    policy = load_policy("square.policy.npz", max_batch_size=8, max_queue_delay=0.1)
    assert isinstance(policy, SolvedPolicy)
    assert policy.bank is not None
    assert policy.bank.rates.tolist() == bank().rates.tolist()
    assert isinstance(load_policy(str(tmp_path / "square.policy.npz"), max_batch_size=5), SolvedPolicy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"policy='no.npz': '/.*/no.npz' cannot be read: No such file or directory"),
        (b"", "policy='no.npz': must be a bank made by `weir solve`"),
        (b"PK\x03\x04 and so on", "policy='no.npz': must be a bank made by `weir solve`"),
        (bank().to_bytes()[:-100], "policy='no.npz': must be a bank made by `weir solve`"),
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


def test_a_folder_is_no_bank(tmp_path: Path) -> None:
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load_policy(f"{tmp_path}/folder.npz")


def test_a_bank_must_know_every_batch_that_it_may_be_asked_for() -> None:
    policy = SolvedPolicy(bank())
    load_policy(policy, max_batch_size=8)
    load_policy(policy)
    with pytest.raises(SettingsError, match=r"solved for batches of up to 8 rows, and max_batch_size=9; lower max_bat"):
        load_policy(policy, max_batch_size=9)


def test_running_a_bank_needs_no_solver_and_no_pictures(tmp_path: Path) -> None:
    path = tmp_path / "square.policy.npz"
    path.write_bytes(bank().to_bytes())
    script = f"""
import sys
from weir.policy.loading import load_policy
from weir.policy.conformance import check_policy
assert "numpy" not in sys.modules
check_policy(load_policy({str(path)!r}))
print(*[name for name in ("scipy", "matplotlib", "asyncio") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


def test_a_policy_that_remembers_is_never_shared() -> None:
    policy = SolvedPolicy(bank())
    first, second = load_policy(policy), load_policy(policy)
    assert isinstance(first, SolvedPolicy)
    assert len({id(each) for each in (policy, first, second)}) == 3
    assert first.bank is policy.bank
