"""Hold imports to one direction, without circles, and the import of the package to a light load."""

import ast
import json
import subprocess
import sys
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import corecontext

ROOT = Path(corecontext.__file__).parent
BASE = ("config", "model_sizes", "visibility", "record", "files", "terminal")
LAYERS = [
    BASE,
    ("graphs",),
    ("ops", "measure"),
    ("cost",),
    ("cache",),
    ("distributed",),
    ("integrations", "data"),
    ("baselines", "inference"),
    ("methods",),
    ("loading",),
    ("perplexity", "info"),
    ("train",),
    ("eval", "serve", "generation"),
    ("demo",),
    ("cli",),
    ("__init__", "__main__"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BACKENDS = {
    "reference": {"fetch"},
    "packed": {"compose", "partial", "pooling", "merge", "sinks"},
    "partial": {"torch_attention"},
    "pooling": {"mass", "rotary"},
}
"""Backend files, and the files of ops that each may import: none imports another backend."""


TOP_FOLDERS = {
    "corecontext": {"corecontext"},
    "benchmarks": {"benchmarks", "corecontext"},
    "reproduction": {"reproduction", "benchmarks", "corecontext"},
}
"""Top folders, and those that each may import."""


@lru_cache
def modules() -> dict[str, Path]:
    """Return the file of every module, by its dotted name."""
    paths = (path for top in TOP_FOLDERS for path in sorted((ROOT.parent / top).rglob("*.py")))
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


@lru_cache
def imported(path: Path) -> set[str]:
    """Return the dotted names of our modules that a file imports, at its top or in functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            submodules = {f"{module}.{alias.name}" for alias in node.names} & set(modules())
            names |= submodules or {module}
    return {name for name in names if name.split(".")[0] in TOP_FOLDERS}


def top_of(module: str) -> str:
    """Return the top folder of a module."""
    return module.split(".")[0]


def layer_of(module: str) -> str:
    """Return the file or folder of the package that holds a module."""
    return [*module.split("."), "__init__"][1]


def test_layers_are_the_files_and_folders_of_the_package():
    assert len(RANK) == sum(map(len, LAYERS)), "a layer is listed twice"
    assert set(RANK) == {layer_of(name) for name in modules() if top_of(name) == "corecontext"}


def test_files_import_only_from_their_left():
    wrong = []
    for module, path in modules().items():
        for name in imported(path):
            if top_of(name) not in TOP_FOLDERS[top_of(module)]:
                wrong.append(f"{module} imports {name}")
            if top_of(module) != "corecontext" or name == "corecontext":
                continue
            layer, rank = layer_of(name), RANK[layer_of(module)]
            if layer == layer_of(module) or (layer in BASE and RANK[layer] == rank):
                continue
            if RANK[layer] >= rank:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_imports_form_no_circle():
    graph = {name: imported(path) - {name} for name, path in modules().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_never_import_one_another(backend):
    names = {
        name.split(".")[2]
        for name in imported(ROOT / "ops" / f"{backend}.py")
        if name.startswith("corecontext.ops.")
    }
    assert names - {"rotary", "capability", "spec"} <= BACKENDS[backend]


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
        "import sys; before = set(sys.modules); import corecontext; "
        "print(*set(sys.modules) - before)"
    ).split()
    assert "corecontext" in loaded
    assert not heavy & {name.split(".")[0] for name in loaded}


IMPORTS = """
import json, sys, torch, torch.nn.functional as F
def names():
    tensor = {"Tensor." + name: x for name, x in vars(torch.Tensor).items()}
    return {**vars(F), **vars(torch.nn), **tensor}
before, modules = names(), set(sys.modules)
from corecontext import cca_attention, merge, Rotary
added = sorted(set(sys.modules) - modules)
import corecontext
corecontext.CompactKVCache
after = names()
from transformers import AttentionInterface
attention = dict(AttentionInterface._global_mapping)
corecontext.enable
print(json.dumps({
    "added": added,
    "patched": [name for name in before if before[name] is not after.get(name)],
    "attention": attention == {
        name: x for name, x in AttentionInterface._global_mapping.items() if name != "cca"
    },
}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What imports do in one fresh interpreter, which loads torch and transformers once."""
    return json.loads(run(IMPORTS))


def test_the_operators_load_neither_transformers_nor_compilers(fresh):
    # torch loads what it likes; what counts is what the operators add to it.
    added = fresh["added"]
    assert "corecontext.ops.api" in added
    assert not {"transformers", "triton"} & {name.split(".")[0] for name in added}
    assert not [name for name in added if name.startswith(("torch._inductor", "torch._dynamo"))]


def test_importing_patches_nothing(fresh):
    assert fresh["patched"] == []


def test_import_leaves_transformers_alone(fresh):
    assert fresh["attention"]


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
