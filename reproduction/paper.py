"""Every row of the paper's tables and figures, and what stands for it here."""

from __future__ import annotations

from typing import NamedTuple

RIVALS = ("vanilla self-attention", "StreamingLLM", "LM-Infinite", "MInference", "CCA-LLM")


class Counterpart(NamedTuple):
    """One row or curve of the paper."""

    where: str
    row: str
    here: str
    """Anchor of the report's section that has the counterpart; "" where there is none."""
    why: str
    """What differs, or why it cannot be had."""


_NO_LONGBENCH = (
    "LongBench-E needs a 7B checkpoint and data that are not here: run `python -m reproduction "
    "--model` with both. The same methods are compared on this page's own tasks. Of the cost, the cache "
    "is counted for the paper's shapes (Figure 4); times are in docs/benchmarks.md."
)
_SMALL = (
    "A small model trained by this project stands for the 7B one; only order and trend compare."
)


def rows() -> list[Counterpart]:
    """All of them, in the paper's order."""
    found = []
    for table, models in (
        ("Table 1", ("LLaMA2-7B-32K", "LLaMA2-7B-80K")),
        ("Table 2", ("LLaMA3.1-8B-128K", "Qwen2.5-7B-128K")),
    ):
        rivals = RIVALS if table == "Table 1" else (RIVALS[0], RIVALS[3], RIVALS[4])
        found += [
            Counterpart(table, f"{model}, {rival}", "methods", _NO_LONGBENCH)
            for model in models
            for rival in rivals
        ]
    found += [
        Counterpart(
            "Table 3",
            f"{rival}, multi-document EM by length",
            "questions",
            f"{_SMALL} Questions are the same kind (NaturalQuestions), with the passages that are here, "
            "and so many of them as fit this model's length: fewer than the paper's 20 to 755.",
        )
        for rival in RIVALS
    ]
    found += [
        Counterpart(
            "Table 4",
            f"{rival}, RULER 8K to 64K",
            "retrieval",
            f"{_SMALL} Facts asked for at the end of a text stand for RULER's retrieval; its other tasks "
            "are `corecontext eval --task ruler` on a checkpoint.",
        )
        for rival in (RIVALS[0], RIVALS[3], RIVALS[4])
    ]
    found += [
        Counterpart("Table 5", row, "methods" if row != "LongLoRA" else "", why)
        for row, why in (
            ("LLaMA2-7B-32K", _NO_LONGBENCH),
            (
                "LongLoRA",
                "It trains with shifted groups and then is full attention, so time and memory are full "
                "attention's; its score needs LongBench-E. `corecontext.baselines.LongLoRA` has the method.",
            ),
            ("CCA-LLM", _NO_LONGBENCH),
        )
    ]
    found += [
        Counterpart(
            "Table 6",
            f"MMLU, {model}, full and ours",
            "cloze",
            "A small model is at chance on MMLU (25 %), which shows nothing; a four-way choice of how a "
            "text goes on, with a constant number of groups, stands for it.",
        )
        for model in ("LLaMA2-7B-8K", "LLaMA2-7B-16K", "LLaMA2-13B-16K", "LLaMA2-13B-32K")
    ]
    found += [
        Counterpart("Table 7", row, "pooling", _SMALL)
        for row in ("mean pooling", "max pooling", "CCA")
    ]
    found += [
        Counterpart("Table 8", f"g = {g}: PPL, latency", "sizes", _SMALL)
        for g in (2, 4, 8, 16, 32, 64)
    ]
    found += [
        Counterpart(
            "Table 9",
            f"s = {s}: PPL, latency",
            "sizes",
            f"{_SMALL} The window is scaled with the length.",
        )
        for s in (256, 512, 1024, 2048, 4096)
    ]
    found += [
        Counterpart(
            "Table 10",
            row,
            "strategies",
            f"{_SMALL} Perplexity and retrieval stand for LongBench-E.",
        )
        for row in ("partial finetuning", "full finetuning")
    ]
    found += [
        Counterpart("Figure 1", "attention of the last token", "maps", _SMALL),
        Counterpart(
            "Figure 3",
            "score against latency for other g and s at test time",
            "flexibility",
            f"{_SMALL} Perplexity stands for LongBench-E's score.",
        ),
        Counterpart(
            "Figure 4",
            "first-token and inter-token time, cache, 4K to 128K",
            "cost",
            "The cache is counted for the paper's own shapes; times of this device are in "
            "docs/benchmarks.md.",
        ),
        Counterpart("Figure 5", "attention maps of 32 tokens, by layer", "maps", _SMALL),
        Counterpart(
            "Figure 6", "loss curves from a shorter and an equal context", "curves", _SMALL
        ),
    ]
    return found
