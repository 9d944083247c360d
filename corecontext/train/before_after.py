"""Compare a trained model with the model that it was: far perplexity, and needles found.

Far perplexity is that of the second half of each window, here a text of one length.
"""

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.data.needles import ANSWER_TOKENS, Needle, make_needles
from corecontext.files import UserError, is_out_of_memory
from corecontext.inference.engine import Engine
from corecontext.integrations.hf.weights import load_weights
from corecontext.loading import load_config
from corecontext.perplexity import document_nll
from corecontext.terminal import progress
from corecontext.train.student import prepare_config, replace_attention
from corecontext.train.train_config import TrainConfig

_log = logging.getLogger(__name__)
BOOK = Path(__file__).resolve().parent.parent / "assets/document.txt"
"""Text around needles, and of the window where there is no evaluation data."""
LEAST_TOKENS = 1024
"""Shorter rows have no far half worth a comparison."""
WINDOWS = 4
"""Rows of a comparison, at most."""
NEEDLES = 10
"""Needles of a comparison."""
LEAST_ROWS = 3 * (WINDOWS + NEEDLES)
"""Rows that a comparison of three models reads. A run that reads fewer itself is compared on one
window, without needles."""


class Line(NamedTuple):
    """The values of one model under one attention."""

    title: str
    perplexity: float
    """Far perplexity."""
    answered: int
    """Needles answered."""


class Comparison(NamedTuple):
    """The lines of a card's table, and the texts that they were measured on."""

    lines: list[Line]
    windows: int
    window_tokens: int
    needles: int
    needle_tokens: int


class _Measurement:
    """The texts of a comparison, and the measurement of one model on them."""

    def __init__(self, config: TrainConfig, tokenizer: Any, rows: Any, arguments: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.arguments = arguments
        book = BOOK.read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(book, verbose=False)["input_ids"])
        length = min(config.context_length, len(ids))
        self.windows: list[Tensor] = _windows(rows) or [ids[:length]]
        self.needles: list[Needle] = []
        if config.steps * config.rows_per_step(1) < LEAST_ROWS:
            del self.windows[1:]
            return
        with suppress(UserError):  # no room for a question
            length -= ANSWER_TOKENS
            self.needles = make_needles(book, tokenizer, length, NEEDLES, config.seed)

    def line(self, title: str, name: str, hf_config: Any, *, full: bool = False) -> Line:
        """Measure the checkpoint `name`, under the run's attention or under full attention."""
        dtype = torch.bfloat16 if self.arguments.bf16 else torch.float32
        device = self.arguments.device
        model = load_weights(name, hf_config, dtype)
        model.to(device).eval()
        if not full:
            replace_attention(model, self.config)
        engine = Engine(model)
        losses = []
        answered = 0
        count = len(self.windows) + len(self.needles)
        with progress(f"comparison, {title}, {count} texts", count) as advance:
            for window in self.windows:  # all of one length
                # The second half; the loss of token t is entry t - 1.
                far = document_nll(model, window[None].to(device))[len(window) // 2 - 1 :]
                losses.append(float(far.double().mean()))
                advance(1)
            for needle in self.needles:
                ids = torch.tensor([needle.ids], device=device)
                options = {"max_new_tokens": ANSWER_TOKENS, "tokenizer": self.tokenizer}
                answer = self.tokenizer.decode(engine.generate(ids, **options)[0])
                answered += needle.is_found(answer)
                advance(1)
        return Line(title, math.exp(sum(losses) / len(losses)), answered)


def compare(
    config: TrainConfig, folder: Path, tokenizer: Any, rows: Any, arguments: Any
) -> Comparison | None:
    """Measure the original model under full attention and under the run's, and the trained one.

    Args:
        folder: The trained model.
        rows: PackedRows of the evaluation data; None measures a window of the bundled book.
        arguments: TrainingArguments: device, bf16, processes.

    Returns:
        None for random weights, short rows or several processes, or where a model does not fit into
        memory beside the trainer's or cannot be measured: a finished training must not fail for its
        card.
    """
    is_alone = arguments.world_size == 1
    if config.strategy == "scratch" or config.context_length < LEAST_TOKENS or not is_alone:
        return None
    try:
        return _compare(config, folder, _Measurement(config, tokenizer, rows, arguments))
    except UserError as error:
        _log.warning("the card has no comparison with the original model: %s", error)
        return None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("no memory for a comparison with the original model: the card has none.")
        return None


def _compare(config: TrainConfig, folder: Path, measurement: _Measurement) -> Comparison:
    """Measure the two or three lines of the table."""
    name = Path(config.model).name
    # The original model has its own rotary base and shape, not those that the run gave it.
    original = prepare_config(config.replace(rope_theta=None, shape={}))
    lines = [measurement.line(f"{name}, full attention", config.model, original, full=True)]
    if config.method != "full":
        changed = prepare_config(config)
        lines.append(measurement.line(f"{name}, this model's attention", config.model, changed))
    trained = str(folder)
    lines.append(measurement.line("this model, trained", trained, load_config(trained)))
    windows = measurement.windows
    needles = measurement.needles
    needle_tokens = max((len(needle.ids) for needle in needles), default=0)
    return Comparison(lines, len(windows), len(windows[0]), len(needles), needle_tokens)


def _windows(rows: Any) -> list[Tensor]:
    """Return at most WINDOWS rows that one document fills; [] without rows."""
    windows = []
    for i in range(0 if rows is None else len(rows)):
        row = rows[i]
        if int((row["position_ids"] == 0).sum()) == 1:
            windows.append(row["input_ids"])
        if len(windows) == WINDOWS:
            break
    return windows
