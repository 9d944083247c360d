"""What every figure shares: colours, the check before any work is done, and writing whole files
only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corecontext.files import UserError, atomic_path

SUFFIXES = (".png", ".svg", ".pdf")
FULL, CCA, FLOOR, FLEX = "#9a9a9a", "#1f6fb4", "#d08a2e", "#5a9a5a"


def check_plot(path: str) -> None:
    """Raise before any work is done if a figure cannot be drawn.

    Raises:
        UserError: matplotlib is missing, or the file's ending says no known format.
    """
    if Path(path).suffix not in SUFFIXES:
        raise UserError(f"plot must end in {', '.join(SUFFIXES)}, got '{path}'.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "plot needs matplotlib, which is not installed. Install it with: "
            "pip install 'corecontext[plot]'"
        ) from None


def pyplot() -> Any:
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write the whole figure or nothing."""
    import matplotlib

    # The same records make the same file: no date, and no random names inside.
    with atomic_path(path) as name, matplotlib.rc_context({"svg.hashsalt": "corecontext"}):
        figure.savefig(name, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot().close(figure)
