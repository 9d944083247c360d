"""Plant a mutant in a copy of the package and see that a test catches it: `python
tests/planted_faults.py [word ...]`.

A mutant is a statement that replaces the one below the comment `# mutant <its name>`, wherever in
the package that comment is. So moving or reformatting code leaves the mutants as they are;
rewriting a marked statement means rewriting its mutant.

The table of docs/numerics.md has the mutants. Prints the row of each; words choose those whose name
contains one of them. A mutant that no test notices, or whose marker is missing, fails the run.
"""

import functools
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKED = ("corecontext", "benchmarks", "reproduction")
"""Folders whose statements are marked."""
TABLE = ROOT / "docs/numerics.md"
"""The page with a row for each fault."""
HEADER = "| law: mutant | faulty statement | test | caught by |\n|---|---|---|---|\n"
BREAK = "\N{RETURN SYMBOL}"
"""Stands for the end of a line of a faulty statement."""


class Fault(NamedTuple):
    """A faulty statement in place of the marked one, and the test that must fail."""

    name: str
    statement: str
    """Replaces the statement (of a compound statement: its header) below the marker."""
    test: str

    @property
    def marker(self) -> str:
        """The comment above the statement."""
        return f"# mutant {self.name}"

    def row(self, caught: str) -> str:
        """Return the row of the table, with the error that the test prints."""
        statement = self.statement.replace("|", r"\|").replace("\n", BREAK)
        return f"| {self.name} | `{statement}` | `{self.test.removeprefix('tests/')}` | {caught} |"


def read_faults() -> list[Fault]:
    """Read the faults from the rows of the table."""
    rows = TABLE.read_text(encoding="utf-8").partition(HEADER)[2].partition("\n\n")[0]
    faults = []
    for row in rows.splitlines():
        name, statement, test, _ = row.strip("| ").split(" | ", 3)
        statement = statement.strip("`").replace(r"\|", "|").replace(BREAK, "\n")
        faults.append(Fault(name, statement, "tests/" + test.strip("`")))
    return faults


FAULTS = read_faults()


@functools.lru_cache(maxsize=2)
def _sources(root: Path) -> list[tuple[Path, str]]:
    """Read the files that may have markers, once for each folder in use."""
    paths = (path for folder in MARKED for path in sorted((root / folder).rglob("*.py")))
    return [(path, path.read_text(encoding="utf-8")) for path in paths]


def find(fault: Fault, root: Path) -> Path:
    """Find the one file of the package that holds the fault's marker.

    Raises:
        ValueError: no file holds it, or it is there more than once.
    """
    lines = [
        path
        for path, source in _sources(root)
        if fault.marker in source
        for line in source.splitlines()
        if line.strip() == fault.marker
    ]
    if len(lines) != 1:
        raise ValueError(
            f"the marker {fault.marker!r} must be in the package once, got {len(lines)} times."
        )
    return lines[0]


def planted(fault: Fault, source: str) -> str:
    """Replace the statement below the marker of a source text.

    Raises:
        ValueError: the fault's statement equals the one that it replaces.
    """
    lines = source.splitlines(keepends=True)
    marked = next(i for i, line in enumerate(lines) if line.strip() == fault.marker)
    first, last, indent = _statement_below(lines, marked + 1)
    faulty = textwrap.indent(fault.statement.strip("\n"), " " * indent) + "\n"
    if _tokens(faulty) == _tokens("".join(lines[first:last])):
        raise ValueError(
            f"the fault {fault.name!r} must differ from the statement that it replaces."
        )
    return "".join([*lines[:first], faulty, *lines[last:]])


def _statement_below(lines: list[str], line: int) -> tuple[int, int, int]:
    """Lines [first, last) and the indentation of the logical line at or below `line`, counted from
    0."""
    start: tuple[int, int] | None = None
    blank = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT)
    for token in tokenize.generate_tokens(iter(lines[line:]).__next__):
        if token.type in blank:
            continue
        if start is None:
            start = token.start
        if token.type == tokenize.NEWLINE:
            return line + start[0] - 1, line + token.end[0], start[1]
    raise ValueError("no statement follows the marker.")


def _tokens(code: str) -> list[str]:
    """The words of a statement, without spaces, line breaks and comments."""
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    readline = io.StringIO(textwrap.dedent(code)).readline
    return [
        token.string for token in tokenize.generate_tokens(readline) if token.type not in skipped
    ]


def run_tests(nodes: list[str], fault: Fault | None = None) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the package with the fault in it, and the first error
    they print."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("corecontext", "tests", "benchmarks", "reproduction"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if fault is not None:
            path = find(fault, copy)
            path.write_text(planted(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0"]
        command += ["-p", "no:cacheprovider", *nodes]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    errors = [line[1:].strip() for line in done.stdout.splitlines() if re.match(r"E  +\S", line)]
    # The rows go into the documentation: no folder of this machine does.
    errors = [re.sub(r"(?:/[\w.-]+){2,}", "...", error) for error in errors]
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest could not run {nodes}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0, errors[0] if errors else ""


def main(words: list[str]) -> int:
    """Run the chosen faults, two at a time; 0 when all are caught."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    passed, message = run_tests(sorted({fault.test for fault in chosen}))
    if not passed:
        print(f"the tests fail without any fault: {message}")
        return 1
    caught = True
    print(HEADER, end="")
    with ThreadPoolExecutor(2) as pool:
        for fault, (passed, message) in zip(
            chosen, pool.map(lambda fault: run_tests([fault.test], fault), chosen)
        ):
            caught &= not passed
            shown = (
                "**NOT CAUGHT**"
                if passed
                else f"`{message[:150].replace('|', '/').replace('`', '')}`"
            )
            print(fault.row(shown), flush=True)
    return 0 if caught else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
