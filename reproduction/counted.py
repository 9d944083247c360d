"""Write the report's parts that need no measurement: its introduction, counted caches, the paper's
rows."""

import html

from benchmarks.tables import Column
from corecontext.visibility import num_complete_groups, window_capacity
from reproduction import paper
from reproduction.html_page import table
from reproduction.sizes import Size

PAPER_SHAPES = (
    ("LLaMA2-7B", 32, 32, 128),
    ("Llama-3.1-8B", 32, 8, 128),
    ("Qwen2.5-7B", 28, 4, 128),
)
"""Name, layers, KV heads and head size."""
PAPER_CONFIG = (16, 1024)  # g and s of Figure 4


def about(size: Size) -> str:
    """Return the introduction."""
    return (
        f"A Llama of {size.layers} layers, width {size.hidden}, {size.heads} query and "
        f"{size.kv_heads} KV heads, trained here with full attention up to {size.length} tokens, "
        f"then given each attention and trained on for {size.adapt_steps} steps of "
        f"{size.adapt_tokens} tokens; g = {size.group}, s = {size.window} unless said otherwise. "
        "<i>Far</i> is the second half of each window. The numbers say nothing about a 7B model: "
        "only order and trend compare with the paper. <i>Beyond the window</i> are questions about "
        f"facts more than s + g = {size.window + size.group} tokens back, whatever a method's own "
        "window. Each number links to its record."
    )


def cache_of_shapes() -> str:
    """Return the cache of the paper's shapes, counted."""
    g, s = PAPER_CONFIG

    def entries(length: int) -> int:
        return min(length, num_complete_groups(length, g) + window_capacity(g, s))

    def gib(layers: int, kv_heads: int, dim: int, count: int) -> str:
        return f"{2 * layers * kv_heads * dim * 2 * count / 2**30:.2f}"

    columns = [
        Column("shape", lambda row: row[0][0]),
        Column("tokens", lambda row: str(row[1])),
        Column("full, GiB", lambda row: gib(*row[0][1:], row[1])),
        Column("CCA, GiB", lambda row: gib(*row[0][1:], entries(row[1]))),
        Column("times less", lambda row: f"{row[1] / entries(row[1]):.1f}"),
    ]
    rows = [(shape, 2**n) for shape in PAPER_SHAPES for n in range(12, 18)]
    return (
        "<p>Counted, not measured: 2 x layers x KV heads x head size x 2 bytes an entry, "
        f"L // g + s + g - 1 entries; g = {g}, s = {s}, half precision.</p>" + table(columns, rows)
    )


def paper_rows() -> str:
    """Return every row of the paper with its counterpart."""
    columns = [
        Column("where", lambda row: row.where),
        Column("row", lambda row: html.escape(row.row)),
        Column(
            "counterpart",
            lambda row: f'<a href="#{row.here}">{row.here}</a>' if row.here else "none",
        ),
        Column("what differs", lambda row: html.escape(row.why)),
    ]
    return table(columns, paper.rows())
