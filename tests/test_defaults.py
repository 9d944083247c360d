"""Settings that hold where a user states none: tests/defaults.txt lists them.

Users rely on them, so a change is a line there and in CHANGELOG.md. After an intended change write
the list anew: `python tests/test_defaults.py`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("defaults.txt")
PUBLIC = (
    *("cli/*", "config/cca_config", "demo/compare", "generation", "loading", "perplexity"),
    *("inference/engine", "inference/session", "integrations/hf/enabling", "ops/api", "ops/merge"),
    *("eval/evaluate", "eval/items", "serve/protocol", "serve/request", "serve/settings"),
    *("train/train_config", "train/run"),
)
"""Modules of commands, settings and the public names."""


def of_function(node: ast.FunctionDef) -> list[str]:
    """Return "name=value" of each parameter that has a default."""
    positional = [*node.args.posonlyargs, *node.args.args]
    last = positional[len(positional) - len(node.args.defaults) :]
    pairs = [*zip(last, node.args.defaults), *zip(node.args.kwonlyargs, node.args.kw_defaults)]
    return [f"{name.arg}={value_of(value)}" for name, value in pairs if value is not None]


def of_class(node: ast.ClassDef) -> list[str]:
    """Return "name=value" of each field that has a default."""
    fields = (x for x in node.body if isinstance(x, ast.AnnAssign) and x.value is not None)
    return [f"{ast.unparse(x.target)}={value_of(x.value)}" for x in fields]


def value_of(node: ast.expr) -> str:
    """Return a default as the source has it, without the description of a field."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            call.keywords = [x for x in call.keywords if x.arg != "description"]
    return ast.unparse(node)


def defaults(path: str, body: list[ast.stmt]) -> Iterator[str]:
    """Yield a line for each class and public function that has defaults."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            values = of_class(node)
            yield from defaults(f"{path}.{node.name}", node.body)
        elif isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
            values = of_function(node)
        else:
            continue
        if values:
            yield f"{path}.{node.name}: {', '.join(values)}"


def all_defaults() -> list[str]:
    """Return the lines of all public modules."""
    lines: list[str] = []
    files = {file for name in PUBLIC for file in (ROOT / "corecontext").glob(f"{name}.py")}
    for file in sorted(files):
        path = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        lines += defaults(path, ast.parse(file.read_text()).body)
    return lines


def test_a_default_changes_only_on_purpose():
    assert all_defaults() == LIST.read_text().splitlines()


if __name__ == "__main__":
    LIST.write_text("\n".join(all_defaults()) + "\n")
