"""Choose the attention of a method by its name."""

from corecontext.baselines.method import Method
from corecontext.files import one_line
from corecontext.loading import load_config
from reproduction.attentions.duo_attention import DuoAttention, find_heads
from reproduction.attentions.minference import MInference
from reproduction.attentions.pattern_search import read_patterns
from reproduction.attentions.pooled import MaxPooled, MeanPooled

POOLED = {method.name: method for method in (MeanPooled, MaxPooled)}


def pick_attention(
    name: str, model: str, patterns: str | None = None, full_heads: str | None = None
) -> str | Method:
    """Return the settings of a rival of the laboratory; other names as they are, for `load`.

    Args:
        model: The checkpoint, whose settings may name DuoAttention's heads.
        patterns: File with MInference's patterns of this model.
        full_heads: See `find_heads`.

    Raises:
        UserError: the file or the heads do not fit the model.
    """
    if name in POOLED:
        return POOLED[name]()
    if name == MInference.name:
        return MInference(None if patterns is None else read_patterns(patterns))
    if name == DuoAttention.name:
        hf_config = load_config(model)
        with one_line():
            return DuoAttention(find_heads(full_heads, hf_config))
    return name
