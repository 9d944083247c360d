"""Hooks of the site's build: pages and figures outside docs/, links between them, equations.

Pages are written for the repository: README.md links to `docs/math.md`, a page in docs/ to
`../results/model.svg`. The site has README.md as its first page, so its links are rewritten here.
"""

import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import latex2mathml.converter
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "results/README.md",
}
"""Pages outside docs/: their path in the repository, and their path in the site."""
ASSETS = ("LICENSE", "CITATION.cff", "results/*.svg", "results/*.jsonl")
LINK = re.compile(r"(\]\(|src=\")([^)#\"\s]+)")
EQUATION = re.compile(r"^```math\n(.*?)^```$", re.S | re.M)
FORMULA = re.compile(r"\$`([^`]+)`\$")
"""A formula in a line, as the repository's pages write it."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the figures that are outside docs/."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for pattern in ASSETS:
        for path in sorted(ROOT.glob(pattern)):
            target = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site, and its equations as MathML."""
    target = page.file.src_uri
    sources = {site: source for source, site in PAGES.items()}
    source = sources.get(target, join("docs", target))

    def link(match: re.Match) -> str:
        return match[1] + site_link(match[2], source, target)

    markdown = LINK.sub(link, markdown)
    markdown = EQUATION.sub(
        lambda match: f'<div class="equation">{mathml(match[1], "block")}</div>', markdown
    )
    return FORMULA.sub(lambda match: mathml(match[1], "inline"), markdown)


def site_link(link: str, source: str, target: str) -> str:
    """Return a link of the repository's file `source` as a link of the site's page `target`."""
    if "://" in link or link.startswith("mailto:"):
        return link
    path = normpath(join(dirname(source), link))
    if os.path.isdir(ROOT / path):
        path = join(path, "README.md")
    path = PAGES.get(path, path.removeprefix("docs/"))
    return relpath(path, dirname(target) or ".")


def mathml(latex: str, display: str) -> str:
    """Return an equation as MathML, a "block" or "inline": browsers draw it without a script."""
    # Line breaks and spacing commands are for the reader of the source.
    text = " ".join(latex.split())
    return latex2mathml.converter.convert(text, display=display)
