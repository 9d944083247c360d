"""Every command and code block in the documents runs, and README's tables say what the records say.

Commands that install are not run but compared with what they install from: pyproject.toml and
.ci/run.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings its ancestor
    import tomli as tomllib  # type: ignore[no-redef]

from benchmarks import figures
from corecontext.cli import main
from reproduction import readme_tables

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: skip because (?P<reason>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```",
    re.S | re.M,
)
SET_UP = "python3 -m venv .venv && .venv/bin/pip install "
ELSEWHERE = ("corecontext layers", "python -m reproduction --smoke")
"""Commands that other tests run, on less."""
needs_assets = pytest.mark.skipif(
    not (ROOT / "corecontext/assets/demo_model/config.json").is_file(),
    reason="the bundled model is not here",
)


def blocks(*kinds: str) -> list:
    """Each block of these kinds as a test's parameter: its text and, where it cannot run, why."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8") if document.exists() else ""
        for match in BLOCK.finditer(text):
            if match["kind"] in kinds:
                line = text[: match.start()].count("\n") + 1
                found.append(
                    pytest.param(match["body"], match["reason"], id=f"{document.name}:{line}")
                )
    return found


def commands() -> list:
    """Each line of each shell block."""
    return [
        pytest.param(
            line,
            block.values[1],
            id=f"{block.id}:{line[:40]}",
            marks=[pytest.mark.slow] if line.startswith(ELSEWHERE) else [],
        )
        for block in blocks("bash", "sh", "shell")
        for line in block.values[0].replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a clone, so that nothing that runs here changes the real one."""
    for name in (
        "corecontext",
        "examples",
        "docs",
        "results",
        "pyproject.toml",
        "Makefile",
        "recipes",
    ):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "results").unlink(missing_ok=True)
    shutil.copytree(ROOT / "results", tmp_path / "results", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_assets
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line, reason", commands())
def test_commands_run(line, reason, clone, monkeypatch, capfd):
    if reason:
        pytest.skip(reason)
    if line.startswith(SET_UP):
        return check_set_up(line.removeprefix(SET_UP))
    if line.startswith("make "):
        makefile = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}:" in makefile for target in line.split()[1:])
        return None
    *before, command = line.split(" | ")
    if before:
        given = subprocess.run(
            " | ".join(before), shell=True, capture_output=True, check=True
        ).stdout
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    program, *arguments = shlex.split(command)
    if program == "corecontext":
        assert main(arguments) == 0
    elif arguments[:1] == ["-m"] and arguments[1] == "benchmarks.figures":
        assert figures.main(arguments[2:]) == 0
    else:
        assert program == "python", f"{line!r}: a kind of command this test does not know"
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        subprocess.run([sys.executable, *arguments], check=True, env=env)


def check_set_up(rest: str) -> None:
    """An install line: what it installs exists, and what it then runs is installed by it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    what, *then = rest.split(" && ")
    wanted = re.fullmatch(r"(?:-e )?'?\.(?:\[([\w,]+)\])?'?", what)
    assert wanted, what
    extras = (wanted[1] or "").split(",") if wanted[1] else []
    assert set(extras) <= set(project["optional-dependencies"])
    for command in then:
        program = shlex.split(command)[0].removeprefix(".venv/bin/")
        if program == "corecontext":
            assert project["scripts"]["corecontext"] == "corecontext.cli:main"
            arguments = shlex.split(command)[1:]
            assert main([*arguments, "--help"]) == 0
        else:
            assert command == ".venv/bin/python -m pytest" and "test" in extras


@needs_assets
@pytest.mark.parametrize("code, reason", blocks("python"))
def test_code_runs(code, reason, clone):
    if reason:
        pytest.skip(reason)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def test_readme_has_the_two_commands_and_ci_calls_the_same():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    demo, test = re.findall(r"^python3 -m venv .*$", readme, re.M)
    assert demo.endswith("/corecontext demo") and test.endswith("-m pytest")
    lines = [line for line in ci.splitlines() if line.startswith("python3")]
    assert lines[-1] == test and "'torch==" in lines[0] and len(lines) == 2
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_the_tables_say_what_the_records_say():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        assert (
            figures.update_tables(text, ROOT / "results", (*figures.TABLES, *readme_tables.TABLES))
            == text
        ), page.name


def test_the_map_names_files_that_exist():
    for document in DOCUMENTS[:2]:
        for path in re.findall(
            r"`((?:corecontext|docs|examples|tests|results|\.ci)/[\w./-]*)`", document.read_text()
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@needs_assets
@pytest.mark.parametrize(
    "argv",
    [
        ["long_prompt.py", "--max-characters", "1500"],
        ["decode_memory.py", "--lengths", "600", "1200"],
    ],
    ids=lambda argv: argv[0],
)
def test_examples_run(argv):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / argv[0]), *argv[1:]],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "bytes" in done.stdout
