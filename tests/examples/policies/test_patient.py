"""The example of a policy of one's own keeps the rules, and does what it says."""

from examples.policies.patient import Patient

from weir.messages import Reason
from weir.policy.loading import load_policy
from weir.testing import check_policy, observations


def test_it_keeps_the_rules() -> None:
    check_policy(Patient())
    check_policy(Patient(lull=0.1, longest=0.1))


def test_it_waits_for_the_end_of_a_burst() -> None:
    seen = next(observations())._replace(
        waiting=3, max_batch_size=8, now=10.0, oldest_arrival=9.998, last_arrival=9.9995
    )
    policy = Patient(lull=0.001, longest=0.01)
    wait = policy.decide(seen)
    assert (wait.rows, wait.until) == (0, 9.9995 + 0.001)
    assert policy.decide(seen._replace(now=9.9995 + 0.001))[:2] == (3, Reason.POLICY)
    assert policy.decide(seen._replace(last_arrival=10.0, oldest_arrival=9.98)).rows == 3
    assert policy.decide(seen._replace(waiting=9))[:2] == (8, Reason.SIZE)


def test_it_is_loaded_from_its_file_with_its_settings() -> None:
    assert repr(load_policy("examples/policies/patient.py:Patient:longest=20ms")) == "Patient(lull=0.001, longest=0.02)"
