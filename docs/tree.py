"""Write the maps of the code from first docstring lines: rooms in README, files in docs/code.md.

`python docs/tree.py` prints both, `python docs/tree.py --write` puts them into their pages.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(?<=<!-- tree -->\n).*?(?=<!-- end tree -->)", re.S)
LABORATORY = ("benchmarks", "reproduction")
FOLDERS = {
    "recipes": "recipes of `corecontext train`; the bundled model was made by one",
    "results": "every published number: a record with device, commit and command",
    "tests": "laws, oracles, error budgets by row, mutants",
}
"""Folders that are no packages, and what they hold."""


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its references."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.sub(r" \(docs/[^)]*\)", "", first).split(". ")[0].rstrip(".:")


def modules_of(package: Path) -> list[Path]:
    """Return the modules of a package that have a name of their own."""
    return sorted(path for path in package.glob("*.py") if not path.name.startswith("_"))


def packages_in(package: Path, depth: int = 0) -> Iterator[tuple[int, Path]]:
    """Yield a package and all packages in it, each with its depth."""
    yield depth, package
    for path in sorted(package.glob("*/__init__.py")):
        yield from packages_in(path.parent, depth + 1)


def rooms() -> str:
    """Return README's tree: all packages of corecontext/, and the other folders."""
    lines = []
    for depth, package in packages_in(ROOT / "corecontext"):
        lines.append((f"{'  ' * depth}{package.name}/", summary(package / "__init__.py")))
        if not depth:
            lines.append(("  *.py", ", ".join(path.stem for path in modules_of(package))))
    lines += [(f"{name}/", summary(ROOT / name / "__init__.py")) for name in LABORATORY]
    lines += [(f"{name}/", text) for name, text in FOLDERS.items()]
    return as_block(lines)


def files() -> str:
    """Return the tree of docs/code.md: every package and module."""
    lines = []
    for name in ("corecontext", *LABORATORY):
        for depth, package in packages_in(ROOT / name):
            lines.append((f"{'  ' * depth}{package.name}/", summary(package / "__init__.py")))
            lines += [(f"{'  ' * depth}  {x.name}", summary(x)) for x in modules_of(package)]
    return as_block(lines)


def as_block(lines: list[tuple[str, str]]) -> str:
    """Return names and what they hold as a Markdown block."""
    width = max(len(name) for name, _ in lines) + 2
    body = "\n".join(f"{name:<{width}}{text}" for name, text in lines)
    return f"```text\n{body}\n```\n"


PAGES = {ROOT / "README.md": rooms, ROOT / "docs/code.md": files}
"""Pages, and the tree that each has between its marks."""


def with_tree(path: Path) -> str:
    """Return a page with the tree between its marks made anew."""
    return MARKED.sub(lambda _: PAGES[path](), path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page, tree in PAGES.items():
        if sys.argv[1:] == ["--write"]:
            page.write_text(with_tree(page), encoding="utf-8")
        else:
            print(tree(), end="")
