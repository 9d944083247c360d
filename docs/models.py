"""Write the table of supported models from the tiny models that the tests run.

`python docs/models.py` prints the table, `python docs/models.py --write` puts it into
docs/models.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = ROOT / "docs" / "models.md"
MARKED = re.compile(r"(?<=<!-- models -->\n).*?(?=<!-- end models -->)", re.S)


def table() -> str:
    """Return a row for each architecture that tests/families.py has a model of."""
    from families import FAMILIES, MORE_FAMILIES

    layers: dict[str, set[bool]] = {}
    for kind, settings in (*FAMILIES.values(), *MORE_FAMILIES.values()):
        is_hybrid = "sliding_attention" in settings.get("layer_types", ())
        layers.setdefault(kind.model_type, set()).add(is_hybrid)
    rows = [
        "| `model_type` | full attention | beside sliding windows | served | trained |",
        "|---|---|---|---|---|",
    ]
    for model_type in sorted(layers):
        full = "yes" if False in layers[model_type] else "no"
        hybrid = "yes" if True in layers[model_type] else "not tested"
        rows.append(f"| `{model_type}` | {full} | {hybrid} | {full} | yes |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table drawn anew."""
    return MARKED.sub(lambda _: table(), page)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
