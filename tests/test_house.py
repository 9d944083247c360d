"""Hold the code to the measures of how it reads: parameters, names, prose, defaults, file names."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("corecontext", "benchmarks", "reproduction")
MOST_PARAMETERS = 8
MOST_PARAMETERS_OF_A_KERNEL = 40
MOST_LINES_OF_A_KERNEL = 200
OPERATORS = {"cca_attention", "pool_core_tokens"}
"""Public operators, whose keywords are written for users."""
VAGUE = {
    *("one", "ones", "found", "part", "parts", "own", "some"),
    *("held", "known", "other", "others", "every"),
}
DEFAULTS = {"group_size": (16, 32), "window_size": (160, 1024)}
"""Defaults that config/presets.py alone may write as numbers."""

# The following lists and ceilings only shrink: a test fails when an entry is no longer needed.
LONG_SIGNATURES: set[str] = set()
WRITTEN_DEFAULTS: set[str] = set()
SHARED_FILE_NAMES: set[str] = set()
DOCSTRINGS_BEGINNING_WITH_WHAT = 14
WHAT_PER_THOUSAND_WORDS = 1.1
VAGUE_NAMES = 30


@lru_cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every file, by its path below the root."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths
    }


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its path."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's parameters, without the object or the context that it belongs to."""
    names = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return sum(name.arg not in ("self", "cls", "ctx") for name in names)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles the function."""
    return any("jit" in ast.unparse(x) for x in node.decorator_list)


def is_kernel_or_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the parameters are a kernel's or options of the command line."""
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    is_command = ".command" in decorators or "typer.Option" in ast.unparse(node.args)
    return is_kernel(node) or is_command


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield every docstring with its place; strings below fields are docstrings too."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node.value.value, str):
                yield f"{path}:{node.lineno}", node.value.value


def comments(path: str) -> Iterator[str]:
    """Yield a file's comments."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_functions_have_at_most_eight_parameters():
    long = {
        node.name: f"{path}:{node.lineno} {node.name} has {parameters(node)}"
        for path, node in functions()
        if parameters(node) > MOST_PARAMETERS
        and node.name not in OPERATORS
        and not is_kernel_or_command(node)
    }
    assert not [place for name, place in long.items() if name not in LONG_SIGNATURES]
    assert not LONG_SIGNATURES - set(long), "short by now: take them out of LONG_SIGNATURES"


def test_kernels_and_their_helpers_are_small():
    large = []
    for path, node in functions():
        lines = node.end_lineno - node.lineno + 1
        number = parameters(node)
        if is_kernel(node) and (
            number > MOST_PARAMETERS_OF_A_KERNEL or lines > MOST_LINES_OF_A_KERNEL
        ):
            large.append(f"{path}:{node.lineno} {node.name}: {number} parameters, {lines} lines")
    assert not large


def test_docstrings_say_the_thing_first():
    beginning = [place for place, text in docstrings() if re.match(r"\s*what\b", text, re.I)]
    assert len(beginning) <= DOCSTRINGS_BEGINNING_WITH_WHAT, beginning


def test_prose_names_things_instead_of_saying_what():
    prose = [text for _, text in docstrings()]
    prose += [comment for path in sources() for comment in comments(path)]
    words = re.findall(r"[a-z']+", " ".join(prose).lower())
    assert 1000 * words.count("what") / len(words) <= WHAT_PER_THOUSAND_WORDS


def test_names_say_what_they_hold():
    vague = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            name = node.arg if isinstance(node, ast.arg) else None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name in VAGUE:
                vague.append(f"{path}:{node.lineno} {name}")
    assert len(vague) <= VAGUE_NAMES, vague


def defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names and defaults of a function's parameters or of a field."""
    if isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        if node.defaults:
            names = positional[-len(node.defaults) :]
            yield from ((name.arg, value) for name, value in zip(names, node.defaults))
        yield from ((name.arg, value) for name, value in zip(node.kwonlyargs, node.kw_defaults))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.value


def test_only_the_config_writes_the_default_group_and_window():
    places = {
        path
        for path, tree in sources().items()
        for node in ast.walk(tree)
        for name, value in defaults(node)
        if name in DEFAULTS and isinstance(value, ast.Constant) and value.value in DEFAULTS[name]
    }
    assert not places - WRITTEN_DEFAULTS
    assert not WRITTEN_DEFAULTS - places, "clean by now: take them out of WRITTEN_DEFAULTS"


def test_files_of_the_package_have_different_names():
    names = Counter(Path(path).name for path in sources() if path.startswith("corecontext/"))
    shared = {name for name, count in names.items() if count > 1}
    shared -= {"__init__.py", "__main__.py", "command.py"}
    assert not shared - SHARED_FILE_NAMES
    assert not SHARED_FILE_NAMES - shared, "unique by now: take them out of SHARED_FILE_NAMES"
