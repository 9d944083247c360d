"""Data flows one way: a file imports only from its left, and importing the package loads nothing
heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import corecontext

ROOT = Path(corecontext.__file__).parent
BASE = ("config", "model_sizes", "visibility", "record", "files", "terminal")
LAYERS = [
    BASE,
    ("ops", "cost", "measure", "drawing"),
    ("cache", "testing"),
    ("distributed",),
    ("integrations", "data"),
    ("baselines", "inference"),
    ("loading",),
    ("perplexity", "info"),
    ("heads",),
    ("train",),
    ("eval", "serve", "generation"),
    ("demo",),
    ("cli",),
    ("__init__", "__main__"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BACKENDS = {
    "reference": set(),
    "packed": {"compose", "partial", "pooling", "merge"},
    "partial": set(),
    "pooling": {"rotary"},
}
"""Backend files, and the files of ops that each may import: none imports another backend."""


def imported(path: Path) -> set[str]:
    """Dotted names of this package that a file imports, at the top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            found.add(module)
            if module == "corecontext" or (ROOT.parent / module.replace(".", "/")).is_dir():
                found |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "corecontext"}


def ranked_files() -> list[tuple[Path, int]]:
    """Every file with the rank of its layer."""
    files = [
        (path, path.relative_to(ROOT).with_suffix("").parts[0])
        for path in sorted(ROOT.rglob("*.py"))
    ]
    assert not {name for _, name in files} - set(RANK), (
        "a new file or folder must be given its place in LAYERS"
    )
    return [(path, RANK[name]) for path, name in files]


def test_files_import_only_from_their_left():
    files = ranked_files()
    assert len({rank for _, rank in files}) > 3  # the walk finds the layers at all
    wrong = []
    for path, rank in files:
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        for name in imported(path):
            layer = (name.split(".") + [""])[1]
            if (
                layer in RANK
                and layer != own
                and (RANK[layer] > rank or (RANK[layer] == rank and layer not in BASE))
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_never_import_one_another(backend):
    names = {
        name.split(".")[2]
        for name in imported(ROOT / "ops" / f"{backend}.py")
        if name.startswith("corecontext.ops.")
    }
    assert names - {"rotary", "capability"} <= BACKENDS[backend]


def test_visibility_knows_no_tensors():
    assert "torch" not in (ROOT / "visibility.py").read_text(encoding="utf-8")


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    ).stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "transformers", "triton", "numpy", "rich"}
    loaded = run(
        "import sys; before = set(sys.modules); import corecontext; print(*set(sys.modules) - before)"
    ).split()
    assert "corecontext" in loaded
    assert not heavy & {name.split(".")[0] for name in loaded}


def test_the_operators_load_neither_transformers_nor_compilers():
    # torch loads what it likes; what counts is what the operators add to it.
    added = run(
        "import sys, torch; before = set(sys.modules); from corecontext import cca_attention, merge, Rotary; "
        "print(*set(sys.modules) - before)"
    ).split()
    assert "corecontext.ops.api" in added
    assert not {"transformers", "triton"} & {name.split(".")[0] for name in added}
    assert not [name for name in added if name.startswith(("torch._inductor", "torch._dynamo"))]


def test_importing_patches_nothing():
    state = (
        "{**vars(F), **vars(torch.nn), **{'Tensor.' + n: x for n, x in vars(torch.Tensor).items()}}"
    )
    assert (
        run(
            f"import torch, torch.nn.functional as F; before = {state}; import corecontext; "
            f"corecontext.cca_attention, corecontext.CompactKVCache; after = {state}; "
            "print([n for n in before if before[n] is not after.get(n)])"
        )
        == "[]"
    )


def test_every_public_name_resolves_and_unknown_ones_do_not():
    for name in (
        "CCAConfig",
        "Rotary",
        "cca_attention",
        "pool_core_tokens",
        "merge",
        "CompactKVCache",
    ):
        assert name in corecontext.__all__ and getattr(corecontext, name).__name__ == name
    with pytest.raises(AttributeError, match="^module 'corecontext' has no attribute 'nothing'$"):
        getattr(corecontext, "nothing")
