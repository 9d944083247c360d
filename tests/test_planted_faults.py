"""Every fault of planted_faults.py is caught by the test that it names."""

from __future__ import annotations

import pytest
from planted_faults import FAULTS, ROOT, run_tests


def test_faults_still_fit_the_code():
    for fault in FAULTS:
        assert fault.old in (ROOT / "corecontext" / fault.file).read_text(encoding="utf-8"), fault.name


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault):
    passed, _ = run_tests([fault.test], fault)
    assert not passed, f"{fault.test} passes with the fault {fault.name!r} planted"
