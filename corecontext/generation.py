"""Continue a text with a loaded model, piece by piece as it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corecontext.loading import Loaded


def generate(loaded: Loaded, input_ids: Any, *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0,
             on_text: Callable[[str], Any]) -> int:
    """Generate up to max_new_tokens tokens.

    Args:
        loaded: The model; its attention decides what is cached.
        input_ids: The prompt, [1, L].
        temperature: 0 takes the likeliest token; more samples.
        seed: Of the sampling.
        on_text: Called with each piece of text as soon as its characters are complete.

    Returns:
        How many tokens were made.
    """
    import torch
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Hands finished text on instead of printing it."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    if loaded.model.generation_config.pad_token_id is None:
        sampling["pad_token_id"] = loaded.tokenizer.eos_token_id or 0  # one sequence: never used, only asked for
    torch.manual_seed(seed)
    streamer = Streamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.inference_mode():
        out = loaded.model.generate(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=True,
                                    max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
    return int(out.shape[1] - input_ids.shape[1])
