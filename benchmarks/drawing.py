"""Set up and save figures: shared colours, matplotlib without a display, whole files only."""

from pathlib import Path
from typing import Any

from corecontext.files import UserError, atomic_path, install_command

SUFFIXES = (".png", ".svg", ".pdf")
FULL = "#9a9a9a"
CCA = "#1f6fb4"
FLOOR = "#d08a2e"
FLEX = "#5a9a5a"


def check_plot(path: str) -> None:
    """Raise before any work is done if a figure cannot be drawn.

    Raises:
        UserError: matplotlib is missing, or the file has an unknown ending.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UserError(f"plot must end in {', '.join(SUFFIXES)}, got '{path}'.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "plot needs matplotlib, which is not installed. Install it with: "
            f"{install_command('plot')}"
        ) from None


def pyplot() -> Any:
    """Import matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str) -> None:
    """Write the whole figure, or on failure no file."""
    import matplotlib

    # The same records make the same file: no date, and no random names inside.
    metadata = {"Date": None} if path.lower().endswith(".svg") else None
    with atomic_path(path) as name, matplotlib.rc_context({"svg.hashsalt": "corecontext"}):
        figure.savefig(name, dpi=150, metadata=metadata)
    pyplot().close(figure)
