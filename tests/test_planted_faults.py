"""Every mutant of planted_faults.py is caught by the test that it names."""

import builtins
import functools
import re
import symtable

import pytest
from planted_faults import FAULTS, MARKED, ROOT, Fault, find, planted, run_tests


@functools.cache
def unknown_names(source: str) -> set[str]:
    """Global names that functions of a source use and nothing in it defines."""
    module = symtable.symtable(source, "", "exec")
    defined = {*module.get_identifiers(), *dir(builtins)}
    tables = [module]
    unknown = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        unknown |= {x.get_name() for x in table.get_symbols() if x.is_global()} - defined
    return unknown


def test_every_fault_has_its_marker_and_changes_the_code():
    for fault in FAULTS:
        source = find(fault, ROOT).read_text(encoding="utf-8")
        assert unknown_names(planted(fault, source)) <= unknown_names(source), fault.name
        path, _, test = fault.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8") or not test, fault.test


def test_every_marker_has_its_fault():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS)
    paths = [path for folder in MARKED for path in (ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert set(re.findall(r"# mutant (.+)", text)) == names


def test_a_fault_that_changes_nothing_is_refused():
    fault = Fault("x", "y = (1 + 2)  # twice", "")
    assert (
        planted(fault, "# mutant x\ny = (3)\nz = 1\n")
        == "# mutant x\ny = (1 + 2)  # twice\nz = 1\n"
    )
    with pytest.raises(ValueError, match="must differ"):
        planted(fault, "# mutant x\ny = (1 +\n     2)\n")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault):
    passed, _ = run_tests([fault.test], fault)
    assert not passed, f"{fault.test} passes with the fault {fault.name!r} planted"
