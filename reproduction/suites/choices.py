"""Ask questions with a fixed set of answers: the likeliest continuation is the choice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from corecontext.eval.items import Outcome, encode_question
from corecontext.eval.subject import ModelSubject
from corecontext.inference import prefill
from corecontext.ops.fetch.prompt_rule import reads_prompts_apart


@dataclass(frozen=True)
class Chosen:
    """A question with a fixed set of answers, with the attributes of `eval.items.Generated`."""

    key: str
    params: Mapping[str, Any]
    make: Callable[[], str] = field(repr=False)
    options: tuple[str, ...]
    """The answers, as they would follow the prompt."""
    right: int
    """Number of the right option."""
    chat: ClassVar[bool] = True
    name: ClassVar[str] = "quality.accuracy"

    def run(self, subject: ModelSubject) -> Outcome:
        """Ask the question and compare the choice."""
        prompt = encode_question(subject, self.make(), self.chat, 1)
        options: Sequence[str] = self.options
        if subject.chat:  # an answer begins with the letter, not with a blank
            options = [option.strip() for option in options]
        chosen = choose(subject, prompt, options)
        details = {
            "prompt_tokens": len(prompt),
            "answer": self.options[chosen].strip(),
            "references": [self.options[self.right].strip()],
        }
        return Outcome(float(chosen == self.right), details)


def choose(subject: ModelSubject, prompt: list[int], options: Sequence[str]) -> int:
    """Return the continuation with the highest log-likelihood; read the prompt only once where each
    is a single token."""
    tokenizer = subject.loaded.tokenizer
    model = subject.loaded.model
    ends = [tokenizer(option, add_special_tokens=False)["input_ids"] for option in options]
    if all(len(end) == 1 for end in ends):
        output = prefill(model, subject.tensor(prompt), chunk_size=subject.chunk_size)
        return int(output.logits[0].float()[[end[0] for end in ends]].argmax())
    # A prompt is read by `prefill`'s attention only into a cache. The tokens of an option, whose
    # logits are kept, are not a part of the prompt.
    config = subject.loaded.config
    use_cache = config is not None and reads_prompts_apart(config)
    scores = []
    for end in ends:
        ids = subject.tensor(prompt + end)
        with torch.inference_mode():
            output = model(ids, use_cache=use_cache, logits_to_keep=len(end) + 1)
        log_p = output.logits[0, :-1].float().log_softmax(-1)
        scores.append(float(log_p.gather(1, ids[0, -len(end) :, None]).sum()))
    return max(range(len(scores)), key=scores.__getitem__)
