"""Install exactly the lowest releases that pyproject.toml allows, in an environment of their own,
and run the tests: `python tests/lowest.py [pytest's arguments]`."""

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest(text: str) -> list[str]:
    """Return a requirement name==release for each lower bound of a pyproject.toml's text."""
    return re.findall(r'"([\w-]+(?:\[\w+\])?>=[\d.]+)', text)


def main() -> int:
    """Make the environment, unless there is one, and run the tests there."""
    folder = ROOT / ".venv-lowest"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        constraints = folder / "constraints.txt"
        bounds = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        exact = [re.sub(r"\[\w+\]", "", bound).replace(">=", "==") for bound in bounds]
        constraints.write_text("\n".join(exact) + "\n", encoding="utf-8")
        install = ["install", "--no-compile", "--constraint", str(constraints), "--editable"]
        subprocess.run([python, "-m", "pip", *install, f"{ROOT}[test]"], check=True)
    return subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
