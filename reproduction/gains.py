"""Compute the share of the long-range gain that each method keeps."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from corecontext.record import Record, make_record
from reproduction.plan import adapted, from_scratch
from reproduction.scoring import windows
from reproduction.sizes import Size
from reproduction.texts import Corpus

DRAWS = 1000
ENDS = ("window", "full")
UNTRAINED_ENDS = ("window_zero", "full_zero")
"""Measured by brief sizes."""


def gains(folder: Path, records: Sequence[Record], size: Size) -> list[Record]:
    """Return (ln window - ln x) / (ln window - ln full) by method and seed.

    Over the second half of each window. The window and full attention were trained as the method
    was: adapted, or from scratch; in a brief size also not adapted. Stages that try a rate or are
    measured in brief have none, nor where full attention gains nothing. `low` and `high` are the
    95 % interval over documents, drawn again a thousand times with all their windows, the same for
    all methods.
    """
    corpus = Corpus(folder, None)  # the tokens are in the folder
    made = []
    for record in records:
        p = record.params
        if record.name != "quality.perplexity" or p.get("bucket") != "far":
            continue
        is_untrained = size.is_brief and p["method"].endswith("_zero")
        ends = UNTRAINED_ENDS if is_untrained else ENDS
        if p["method"] in ends:
            continue
        stage_of = from_scratch if p["stage"] == from_scratch(p["method"], p["seed"]) else adapted
        stages = [*(stage_of(end, p["seed"]) for end in ends), p["stage"]]
        paths = [folder / stage / f"far_{p['split']}.npy" for stage in stages]
        if not all(path.exists() for path in paths):
            continue
        window, full, ours = (np.load(path).astype(np.float64) for path in paths)
        if (window - full).mean() <= 0:
            continue
        documents = [document for _, document in windows(corpus, size, p["split"])]
        kept = float((window - ours).mean() / (window - full).mean())
        interval = _interval(_sums(window - ours, documents), _sums(window - full, documents))
        params = {key: value for key, value in p.items() if key != "bucket"}
        params |= {**interval, "from": stages}
        made.append(make_record("quality.gain_kept", kept, params, device=record.device))
    return made


def _sums(values: np.ndarray, documents: Sequence[int]) -> np.ndarray:
    """Return the sum of each document's windows."""
    return np.array(
        [
            sum(value for value, at in zip(values, documents) if at == document)
            for document in dict.fromkeys(documents)
        ]
    )


def _interval(kept: np.ndarray, whole: np.ndarray) -> dict[str, float]:
    """Return the 95 % interval of the share over documents drawn with replacement."""
    rng = random.Random(0)
    shares = []
    for _ in range(DRAWS):
        drawn = rng.choices(range(len(kept)), k=len(kept))
        if whole[drawn].sum() > 0:
            shares.append(kept[drawn].sum() / whole[drawn].sum())
    if not shares:
        return {}
    shares.sort()
    return {"low": shares[len(shares) // 40], "high": shares[-1 - len(shares) // 40]}
