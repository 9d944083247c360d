"""Hold the pages to the code: commands and code blocks run, tables and the tree are drawn anew.

Commands that install are not run but compared with what they install from: pyproject.toml and
.ci/run.
"""

import importlib
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings its ancestor
    import tomli as tomllib  # type: ignore[no-redef]

from benchmarks import figures, operator
from benchmarks import model as model_bench
from corecontext.cli import main
from reproduction import readme_tables

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: skip because (?P<reason>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)^```",
    re.S | re.M,
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
SET_UP = "python3 -m venv .venv && .venv/bin/pip install "
ELSEWHERE = (
    "python -m reproduction layers",
    "python -m benchmarks operator",
    "python -m reproduction --smoke",
)
"""Commands that other tests run, on less."""
needs_assets = pytest.mark.skipif(
    not (ROOT / "corecontext/assets/demo_model/config.json").is_file(),
    reason="the bundled model is not here",
)


def blocks(*kinds: str) -> list:
    """Return each block of these kinds as a test's parameter, skipped where it cannot run."""
    parameters = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match["kind"] not in kinds:
                continue
            line = text[: match.start()].count("\n") + 1
            marks = [pytest.mark.skip(reason=match["reason"])] if match["reason"] else []
            name = f"{document.name}:{line}"
            parameters.append(pytest.param(match["body"], id=name, marks=marks))
    return parameters


def commands() -> list:
    """Return each line of each shell block as a test's parameter."""
    parameters = []
    for block in blocks("bash", "sh", "shell"):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            slow = [pytest.mark.slow] if line.startswith(ELSEWHERE) else []
            name = f"{block.id}:{line[:40]}"
            parameters.append(pytest.param(line, id=name, marks=[*block.marks, *slow]))
    return parameters


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a clone, so that a command cannot change the real one."""
    for name in ("corecontext", "examples", "docs", "pyproject.toml", "Makefile", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    # Figures are drawn into results/; the stages below results/reproduction are only read.
    (tmp_path / "results").mkdir()
    for path in (ROOT / "results").iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / "results")
        else:
            (tmp_path / "results" / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_assets
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", commands())
def test_commands_run(line, clone, monkeypatch, capfd):
    # The machine's rates, which test_bench.py measures: on a CPU they take seconds.
    for module in (model_bench, operator):
        monkeypatch.setattr(module, "matmul_flops_per_s", lambda *args: 1e10)
        monkeypatch.setattr(module, "copy_bytes_per_s", lambda *args: 1e9)
    if line.startswith(SET_UP):
        return check_set_up(line.removeprefix(SET_UP))
    if line.startswith("make "):
        makefile = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}:" in makefile for target in line.split()[1:])
        return None
    *before, command = line.split(" | ")
    if before:
        shell = " | ".join(before)
        given = subprocess.run(shell, shell=True, capture_output=True, check=True).stdout
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    program, *arguments = shlex.split(command)
    if program == "corecontext":
        assert main(arguments) == 0
    else:
        assert program == "python", f"{line!r}: a kind of command this test does not know"
        run_python(arguments, monkeypatch)
    return None


def run_python(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python ARGUMENTS` in this process, which saves an import of torch."""
    monkeypatch.syspath_prepend(str(ROOT))
    try:
        if arguments[0] == "-m":
            monkeypatch.setattr(sys, "argv", arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            monkeypatch.setattr(sys, "argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code


def test_extras_that_errors_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    source = "".join(path.read_text() for path in (ROOT / "corecontext").rglob("*.py"))
    named = re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", source)
    assert {"lm-eval", "serve", "train"} <= set(named) <= set(extras)


def check_set_up(rest: str) -> None:
    """Check an install line: its extras exist, and they install the command that follows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target, *then = rest.split(" && ")
    wanted = re.fullmatch(r"(?:-e )?'?\.(?:\[([\w,]+)\])?'?", target)
    assert wanted, target
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
@pytest.mark.parametrize("code", blocks("python"))
def test_code_runs(code, clone):
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def test_readme_has_the_two_commands_and_ci_calls_the_same():
    readme, ci = README.read_text(), (ROOT / ".ci" / "run").read_text()
    demo, test = re.findall(r"^python3 -m venv .*$", readme, re.M)
    assert demo.endswith("/corecontext demo") and test.endswith("-m pytest")
    lines = [line for line in ci.splitlines() if line.startswith("python3")]
    assert lines[-1] == test and "'torch==" in lines[0] and len(lines) == 2
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_no_command_runs_on_two_pages():
    lines = [command.values[0] for command in commands() if not command.values[0][0].isspace()]
    run = [line for line in lines if line.startswith(("corecontext", "python -m", "head"))]
    assert sorted(set(run)) == sorted(run)


def test_readme_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    assert sum(line.startswith("|") for line in lines) <= 24


def test_the_tables_say_what_the_records_say():
    for page in (README, *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        tables = (*figures.TABLES, *readme_tables.TABLES)
        assert figures.update_tables(text, ROOT / "results", tables) == text, page.name


def test_the_shares_in_readme_are_those_of_the_page_about_the_model():
    tables = (ROOT / "docs/real-model.md").read_text(encoding="utf-8")
    shares = re.findall(r"\d+\.\d %", README.read_text(encoding="utf-8"))
    assert len(shares) >= 5 and all(share in tables for share in shares)


def tree_writer() -> ModuleType:
    """Load docs/tree.py, which is a script beside the pages."""
    spec = importlib.util.spec_from_file_location("tree", ROOT / "docs/tree.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_is_that_of_the_packages():
    tree = tree_writer()
    for page in tree.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tree.with_tree(page) == text, f"{page.name}: run python docs/tree.py --write"
    empty = [line for line in tree.files().splitlines() if len(line.split()) < 2]
    assert not [line for line in empty if not line.startswith("```")], "a docstring is missing"


def test_pages_name_files_that_exist():
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for path in re.findall(
            r"`((?:corecontext|benchmarks|reproduction|docs|examples|tests|\.ci)/[\w./-]*)`", text
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def heading_anchors(document: Path) -> set[str]:
    """Return the anchors of a page's headings, as the repository page and the site make them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        page = document.parent / target if target else document
        assert page.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in heading_anchors(page), f"{document.name} links to {target}#{anchor}"


def test_every_page_but_the_lab_book_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert (f": {name}\n" in navigation) is (name != "tuning-notes.md"), name


def test_the_reference_names_what_exists():
    names = [
        name
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.M)
    ]
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        public = getattr(importlib.import_module(module), attribute, None)
        assert public is not None and public.__doc__, f"{name} is missing or has no docstring"


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocstrings")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        # Nothing may come from another host: the site is read offline.
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\">]+)", page.read_text()
        )
        assert not loaded, f"{page.name} loads {loaded[0]}"


@needs_assets
@pytest.mark.parametrize(
    "argv",
    [
        ["long_prompt.py", "--max-characters", "1500"],
        ["decode_memory.py", "--lengths", "600", "1200"],
    ],
    ids=lambda argv: argv[0],
)
def test_examples_run(argv, monkeypatch, capsys):
    run_python([str(ROOT / "examples" / argv[0]), *argv[1:]], monkeypatch)
    assert "bytes" in capsys.readouterr().out
