"""Write README's tree of the code from the first docstring line of each package and module.

`python docs/tree.py` prints the tree, `python docs/tree.py --write` puts it into README.md.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(?<=<!-- tree -->\n).*?(?=<!-- end tree -->)", re.S)
LABORATORY = ("benchmarks", "reproduction")
FOLDERS = {
    "recipes": "recipes of `corecontext train`; the bundled model was made by one",
    "results": "every published number: a record with device, commit and command",
    "tests": "laws, oracles, error budgets by row, planted faults",
}
"""Folders that are no packages, and what they hold."""


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its references."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.sub(r" \(docs/[^)]*\)", "", first).split(". ")[0].rstrip(".")


def entries(package: Path) -> list[tuple[str, str]]:
    """Return the modules and packages of a package, each with its summary: modules first."""
    modules = sorted(path for path in package.glob("*.py") if not path.name.startswith("_"))
    packages = sorted(package.glob("*/__init__.py"))
    return [(path.name, summary(path)) for path in modules] + [
        (f"{path.parent.name}/", summary(path)) for path in packages
    ]


def tree() -> str:
    """Return the tree as a Markdown block: corecontext/ in two levels, other folders in one."""
    package = ROOT / "corecontext"
    lines = [("corecontext/", summary(package / "__init__.py"))]
    lines += [(f"  {name}", text) for name, text in entries(package)]
    lines += [(f"{name}/", summary(ROOT / name / "__init__.py")) for name in LABORATORY]
    lines += [(f"{name}/", text) for name, text in FOLDERS.items()]
    width = max(len(name) for name, _ in lines) + 2
    body = "\n".join(f"{name:<{width}}{text}" for name, text in lines)
    return f"```text\n{body}\n```\n"


def with_tree(page: str) -> str:
    """Return a page with the tree between its marks made anew."""
    return MARKED.sub(lambda _: tree(), page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    if sys.argv[1:] == ["--write"]:
        readme.write_text(with_tree(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tree(), end="")
