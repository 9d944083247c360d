"""Continue a text with a loaded model, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corecontext.files import UserError
from corecontext.loading import Loaded

PLAIN = {
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "min_p": 0.0,
    "top_h": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "stop_strings": None,
}
"""Settings of a checkpoint's generation config that the engine does not have, at the values that
have no effect."""


def generate(
    loaded: Loaded,
    input_ids: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    chunk_size: int | None = None,
    on_text: Callable[[str], Any],
) -> int:
    """Generate up to max_new_tokens tokens after the prompt `input_ids`, [1, L]; return their
    number.

    Under CCA by the engine of `corecontext.inference`; under full attention, and where the
    checkpoint asks for settings that the engine does not have (a repetition penalty, say), by
    `model.generate`. Their tokens are the same.

    Args:
        temperature: 0 takes the likeliest token; more samples.
        chunk_size: Tokens of the prompt read at once; None follows from the model and the free
            memory.
        on_text: Called with each piece of text as soon as its characters are complete.

    Raises:
        UserError: GPU memory ran out while the prompt was read; says what would fit.
    """
    import torch
    from transformers import TextStreamer

    from corecontext.inference import Engine, Sampling

    class Streamer(TextStreamer):
        """Hand finished text on instead of printing it."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    streamer = Streamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    if Sampling(temperature).kind == "greedy":
        temperature = 0.0
    settings = loaded.model.generation_config
    plain = all(getattr(settings, name, None) in (None, value) for name, value in PLAIN.items())
    if loaded.config is None or not plain:
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        options["use_cache"] = True
        if temperature > 0:
            options["temperature"] = temperature
        if chunk_size is not None:
            options["prefill_chunk_size"] = chunk_size
        torch.manual_seed(seed)
        return _with_transformers(loaded, input_ids, streamer, options)

    sampling = Sampling.from_generation_config(
        settings, do_sample=temperature > 0, temperature=temperature
    )
    made = 0
    streamer.put(input_ids)
    try:
        with Engine(loaded.model, chunk_size=chunk_size).stream(
            input_ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed
        ) as stream:
            for step in stream:
                streamer.put(torch.tensor(step))
                made += 1
    except MemoryError as error:
        if not str(error):
            raise
        raise UserError(str(error)) from None
    streamer.end()
    return made


def _with_transformers(
    loaded: Loaded, input_ids: Any, streamer: Any, options: dict[str, Any]
) -> int:
    """Generate by `model.generate`; return the number of new tokens."""
    import torch

    from corecontext.inference.limits import free_bytes, whole_does_not_fit

    model = loaded.model
    if model.generation_config.pad_token_id is None:
        # Never used for a single sequence, but asked for.
        options["pad_token_id"] = loaded.tokenizer.eos_token_id or 0
    free = free_bytes(model.device) or 0
    length = int(input_ids.shape[1])
    mask = torch.ones_like(input_ids)
    try:
        with torch.inference_mode():
            out = model.generate(input_ids, attention_mask=mask, streamer=streamer, **options)
    except torch.OutOfMemoryError:
        raise UserError(whole_does_not_fit(model.config, model.dtype, length, free)) from None
    return int(out.shape[1]) - length
