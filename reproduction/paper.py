"""List every row of the paper's tables and figures, with its counterpart here."""

from collections.abc import Iterator
from typing import NamedTuple


class Counterpart(NamedTuple):
    """One row or curve of the paper."""

    where: str
    row: str
    here: str
    """Anchor of the report's section that has the counterpart; "" where there is none."""
    why: str
    """The difference, or the reason why there is none."""


FULL = "vanilla self-attention"
ALL = (FULL, "StreamingLLM", "LM-Infinite", "MInference", "CCA-LLM")
SOME = (FULL, "MInference", "CCA-LLM")
NO_LONGBENCH = (
    "LongBench-E needs a 7B checkpoint and data that are not here: run `python -m reproduction "
    "--model` with both. The same methods are compared on this page's own tasks. Of the cost, the "
    "cache is counted for the paper's shapes (Figure 4); times are in docs/benchmarks.md."
)
SMALL = "A small model trained by this project stands for the 7B one; only order and trend compare."
QUESTIONS = (
    f"{SMALL} Questions are the same kind (NaturalQuestions), with the passages that are here, and "
    "so many of them as fit this model's length: fewer than the paper's 20 to 755."
)
FACTS = (
    f"{SMALL} Facts asked for at the end of a text stand for RULER's retrieval; its other tasks "
    "are `python -m reproduction compare --task ruler` on a checkpoint."
)
LONGLORA = (
    "It trains with shifted groups and then is full attention, so time and memory are full "
    "attention's; its score needs LongBench-E. `reproduction.attentions.longlora` has the method."
)
CLOZE = (
    "A small model is at chance on MMLU (25 %), which shows nothing; a four-way choice of how a "
    "text goes on, with a constant number of groups, stands for it."
)
COST = (
    "The cache is counted for the paper's own shapes; times of this device are in "
    "docs/benchmarks.md."
)
STRATEGIES = f"{SMALL} Perplexity and retrieval stand for LongBench-E."
FLEXIBILITY = f"{SMALL} Perplexity stands for LongBench-E's score."
MMLU_MODELS = ("LLaMA2-7B-8K", "LLaMA2-7B-16K", "LLaMA2-13B-16K", "LLaMA2-13B-32K")


def rows() -> list[Counterpart]:
    """Return all of them, in the paper's order."""
    return list(_rows())


def _rows() -> Iterator[Counterpart]:
    for model in ("LLaMA2-7B-32K", "LLaMA2-7B-80K"):
        for method in ALL:
            yield Counterpart("Table 1", f"{model}, {method}", "methods", NO_LONGBENCH)
    for model in ("LLaMA3.1-8B-128K", "Qwen2.5-7B-128K"):
        for method in SOME:
            yield Counterpart("Table 2", f"{model}, {method}", "methods", NO_LONGBENCH)
    for method in ALL:
        row = f"{method}, multi-document EM by length"
        yield Counterpart("Table 3", row, "questions", QUESTIONS)
    for method in SOME:
        yield Counterpart("Table 4", f"{method}, RULER 8K to 64K", "retrieval", FACTS)
    yield Counterpart("Table 5", "LLaMA2-7B-32K", "methods", NO_LONGBENCH)
    yield Counterpart("Table 5", "LongLoRA", "", LONGLORA)
    yield Counterpart("Table 5", "CCA-LLM", "methods", NO_LONGBENCH)
    for model in MMLU_MODELS:
        yield Counterpart("Table 6", f"MMLU, {model}, full and ours", "cloze", CLOZE)
    for row in ("mean pooling", "max pooling", "CCA"):
        yield Counterpart("Table 7", row, "pooling", SMALL)
    for g in (2, 4, 8, 16, 32, 64):
        yield Counterpart("Table 8", f"g = {g}: PPL, latency", "sizes", SMALL)
    for s in (256, 512, 1024, 2048, 4096):
        why = f"{SMALL} The window is scaled with the length."
        yield Counterpart("Table 9", f"s = {s}: PPL, latency", "sizes", why)
    for row in ("partial finetuning", "full finetuning"):
        yield Counterpart("Table 10", row, "strategies", STRATEGIES)
    yield Counterpart("Figure 1", "attention of the last token", "maps", SMALL)
    row = "score against latency for other g and s at test time"
    yield Counterpart("Figure 3", row, "flexibility", FLEXIBILITY)
    row = "first-token and inter-token time, cache, 4K to 128K"
    yield Counterpart("Figure 4", row, "cost", COST)
    yield Counterpart("Figure 5", "attention maps of 32 tokens, by layer", "maps", SMALL)
    row = "loss curves from a shorter and an equal context"
    yield Counterpart("Figure 6", row, "curves", SMALL)
