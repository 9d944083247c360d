"""Write the tables of README and docs about quality: the miniature's, and those of a pretrained
model.

`python -m reproduction.readme_tables` writes the tables anew, and draws results/real.svg.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import PageTable, update_pages
from corecontext.record import read_records
from reproduction.indices.tables import index_markdown
from reproduction.quality_tables import (
    SHORT,
    bundled_markdown,
    quality_markdown,
    scratch_markdown,
)
from reproduction.real.choice_tables import choices_markdown, heads_markdown
from reproduction.real.figure import draw_frontier, draw_presets
from reproduction.real.preset_tables import (
    bytes_markdown,
    groups_markdown,
    presets_markdown,
    prompts_markdown,
)
from reproduction.real.tables import (
    extended_markdown,
    real_markdown,
    tries_markdown,
)
from reproduction.rivals.tables import rivals_markdown

SMOLLM2 = ("model", "smollm2-135m-instruct")
ADAPTED = ("model", "smollm2-135m-instruct-adapted")
"""The model with the package's adapter in its weights."""
TABLES: Sequence[PageTable] = (
    PageTable("quality", "quality", quality_markdown),
    PageTable("quality, scratch", "quality", scratch_markdown),
    PageTable("quality, bundled", "quality", bundled_markdown),
    PageTable("quality, short", "quality", partial(quality_markdown, names=SHORT)),
    PageTable("real, as it is", "real", partial(real_markdown, trained=False), SMOLLM2),
    PageTable("real, trained", "real", partial(real_markdown, trained=True), SMOLLM2),
    PageTable("real, adapter", "real", partial(real_markdown, trained=False), ADAPTED),
    PageTable("real, tries", "real", tries_markdown, SMOLLM2),
    PageTable("real, short", "real", partial(real_markdown, trained=False, short=True), SMOLLM2),
    PageTable("real, indices", "real", index_markdown, SMOLLM2),
    PageTable("real, extended", "real", extended_markdown, SMOLLM2),
    PageTable("presets", "real user?", presets_markdown),
    PageTable("presets, short", "real user?", partial(presets_markdown, short=True)),
    PageTable("presets, bytes", "", bytes_markdown),
    PageTable("presets, groups", "real", groups_markdown),
    PageTable("presets, prompts", "real", prompts_markdown),
    PageTable("choices", "choices", choices_markdown),
    PageTable("choices, heads", "real", heads_markdown),
    PageTable("rivals, as it is", "rivals", partial(rivals_markdown, trained=False)),
    PageTable("rivals, trained", "rivals", partial(rivals_markdown, trained=True)),
)

if __name__ == "__main__":
    update_pages("README.md", Path("results"), TABLES)
    real, rivals = (read_records(f"results/{name}.jsonl") for name in ("real", "rivals"))
    draw_frontier(real, rivals, "results/real.svg")
    draw_presets(real, rivals, "results/presets.svg")
