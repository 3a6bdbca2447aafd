"""Every planted fault still has a place in the source."""

from importlib import import_module
from operator import attrgetter

from tests.faults.known import FAULTS
from tests.faults.planting import edited
from tests.simulated.mutants import MUTANTS


def test_every_fault_changes_what_it_names() -> None:
    for name, fault in (FAULTS | MUTANTS).items():
        assert (fault.edit is None) != (fault.value is None), name
        if fault.edit is not None:
            edited(fault)
        else:
            attrgetter(fault.where.partition(":")[2])(import_module(fault.module))
