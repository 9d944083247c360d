"""Continue a text with a loaded model, piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from corecontext.data.chat import chat_prompt
from corecontext.files import UserError
from corecontext.loading import Loaded, encode, one_line

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
"""Settings of a checkpoint's generation config that the engine does not have, at the values at
which they have no effect. With others transformers generates."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Hold the options of `generate`.

    Raises:
        UserError: a number breaks a rule.
    """

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token; larger values sample."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; None takes the checkpoint's k."""
    top_p: float | None = None
    """Sample among the likeliest tokens that have this probability together; None takes the
    checkpoint's."""
    seed: int = 0
    chunk_size: int | None = None
    """Tokens of the prompt read at once; None follows from the model and the free memory."""

    def __post_init__(self) -> None:
        from corecontext.inference import Sampling

        with one_line():
            top_p = 1.0 if self.top_p is None else self.top_p
            sampling = Sampling(self.temperature, self.top_k, top_p)
        if sampling.kind == "greedy":  # so cold that only the likeliest token is drawn
            object.__setattr__(self, "temperature", 0.0)
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise UserError(
                f"temperature must be more than 0 to sample by top-k or top-p, got "
                f"{self.temperature}. Give for example --temperature 0.7."
            )
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed must be from -2**63 to 2**63 - 1, got {self.seed}.")

    @property
    def sampling(self) -> dict[str, Any]:
        """The keywords that `model.generate` and `Sampling.from_generation_config` share."""
        if not self.temperature:
            return {"do_sample": False}
        settings = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        chosen = {name: value for name, value in settings.items() if value is not None}
        return {"do_sample": True, **chosen}


def encode_prompt(
    loaded: Loaded, text: str, question: str | None, chat: bool | None, *, room_for: int
) -> Any:
    """Return the token numbers of a prompt, [1, L], on the model's device.

    Args:
        text: To be continued, or asked about.
        question: Follows the text; None asks nothing.
        chat: Whether text and question are a user's message in the model's chat template; None: if
            there is a question and a template.
        room_for: Tokens of the answer: prompt and answer must fit the model's limit.

    Raises:
        UserError: the model has no chat template, or as `encode`.
    """
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise UserError("the model's tokenizer has no chat template. Leave --chat-template out.")
    if chat is None:
        chat = question is not None and has_template
    if question is not None:
        text = f"{text.rstrip()}\n\n{question}"
    if not chat:
        suffix = "" if question is None else "\n"
        return encode(loaded, text + suffix, room_for=room_for)
    with one_line():
        text = chat_prompt(loaded.tokenizer, [("user", text)])
    return encode(loaded, text, room_for=room_for, special_tokens=False)


def generate(
    loaded: Loaded,
    input_ids: Any,
    continuation: Continuation,
    *,
    on_text: Callable[[str], Any],
    on_chunk: Callable[[int], Any] = lambda tokens: None,
) -> int:
    """Generate up to max_new_tokens tokens after the prompt `input_ids`, [1, L]; return their
    number.

    Under CCA the engine of `corecontext.inference` generates. Under full attention, and where the
    checkpoint has settings that the engine does not have (a repetition penalty, say), it is
    transformers' `model.generate`. Their tokens are the same.

    Args:
        on_text: Called with each piece of text as soon as its characters are complete.
        on_chunk: Called by the engine after each chunk of the prompt with the tokens read so far.

    Raises:
        UserError: memory ran out while the prompt was read (it says what would fit), or logits are
            NaN or infinite.
    """
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Pass finished text to `on_text` instead of printing it."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    streamer = Streamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    settings = loaded.model.generation_config
    plain = all(getattr(settings, name, None) in (None, value) for name, value in PLAIN.items())
    with one_line():
        if loaded.config is None or not plain:
            return _with_transformers(loaded, input_ids, continuation, streamer)
        return _with_engine(loaded, input_ids, continuation, streamer, on_chunk)


def _with_engine(
    loaded: Loaded,
    input_ids: Any,
    continuation: Continuation,
    streamer: Any,
    on_chunk: Callable[[int], Any],
) -> int:
    """Generate by the engine; return the number of new tokens."""
    import torch

    from corecontext.inference import Engine, Sampling

    made = 0
    streamer.put(input_ids)
    try:
        with Engine(loaded.model, chunk_size=continuation.chunk_size).stream(
            input_ids,
            max_new_tokens=continuation.max_new_tokens,
            sampling=Sampling.from_generation_config(
                loaded.model.generation_config, **continuation.sampling
            ),
            seed=continuation.seed,
            on_chunk=on_chunk,
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
    loaded: Loaded, input_ids: Any, continuation: Continuation, streamer: Any
) -> int:
    """Generate by `model.generate`; return the number of new tokens."""
    import torch

    from corecontext.inference.chunk_size import free_bytes
    from corecontext.inference.limits import whole_does_not_fit
    from corecontext.inference.sampling import InvalidLogits

    def check(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.amax(-1).isfinite().all():
            raise InvalidLogits
        return scores

    model = loaded.model
    options: dict[str, Any] = {"use_cache": True, **continuation.sampling}
    if continuation.chunk_size is not None:
        options["prefill_chunk_size"] = continuation.chunk_size
    if model.generation_config.pad_token_id is None:
        # Never used for a single sequence, but transformers warns without it.
        options["pad_token_id"] = loaded.tokenizer.eos_token_id or 0
    torch.manual_seed(continuation.seed)
    free = free_bytes(model.device) or 0
    length = int(input_ids.shape[1])
    try:
        with torch.inference_mode():
            out = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=continuation.max_new_tokens,
                logits_processor=[check],
                streamer=streamer,
                **options,
            )
    except torch.OutOfMemoryError:
        raise UserError(whole_does_not_fit(model.config, model.dtype, length, free)) from None
    return int(out.shape[1]) - length
