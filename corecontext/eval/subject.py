"""The model under test as tasks use it: texts in, answers out."""

from typing import Any

from corecontext.data.chat import chat_prompt
from corecontext.files import UserError
from corecontext.loading import Loaded, one_line
from corecontext.perplexity import document_nll


class ModelSubject:
    """A loaded model, greedy, one prompt at a time.

    Args:
        loaded: The model under an attention.
        num_groups: Number of core tokens at any length, under CCA; None keeps the group size.
        chunk_size: Tokens of a prompt read at once.
        chat_template: Whether questions are a user's message in the model's chat template; None
            where its tokenizer has one.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        num_groups: int | None = None,
        chunk_size: int | None = None,
        chat_template: bool | None = None,
    ) -> None:
        from corecontext.inference import Engine
        from corecontext.integrations.hf.enabling import handle_of

        self.loaded = loaded
        self.chunk_size = chunk_size
        self.has_num_groups = num_groups is not None
        has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
        if chat_template and not has_template:
            raise UserError(
                "chat-template must be left out for a model whose tokenizer has none, got "
                "--chat-template."
            )
        self.chat = has_template and chat_template is not False
        """Whether questions go into the chat template."""
        if num_groups is not None:
            handle = handle_of(loaded.model)
            if handle is None:
                raise UserError(
                    f"num-groups must be given with core tokens, got {num_groups} for another "
                    "method."
                )
            with one_line():
                handle.configure(num_groups=num_groups)
        # Prompts come one by one, so one cache is kept for the next.
        self.engine = Engine(loaded.model, chunk_size=chunk_size, keep=1)

    @property
    def limit(self) -> int | None:
        """Most tokens of prompt and answer together; None: no limit is known."""
        return self.loaded.max_length

    def idle_note(self, length: int) -> str:
        """Return a note that the method is full attention on texts of this length, or ""."""
        return "" if self.has_num_groups else self.loaded.idle_note(length)

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids, with BOS where the tokenizer adds it."""
        return self.loaded.tokenizer(text, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.loaded.tokenizer.decode(ids, skip_special_tokens=True)

    def encode_prompt(self, prompt: str, chat: bool = True) -> list[int]:
        """Return the token ids of a prompt. With `chat` it is a question, a user's message in the
        chat template where the subject uses that; else a text to continue."""
        if not (self.chat and chat):
            return self.encode(prompt)
        tokenizer = self.loaded.tokenizer
        with one_line():
            text = chat_prompt(tokenizer, [("user", prompt)])
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def generate(self, prompt: list[int], max_new_tokens: int, stop: tuple[str, ...] = ()) -> str:
        """Return the greedy continuation, up to the model's end of text or with a stop string."""
        ids = self.engine.generate(
            self.tensor(prompt),
            max_new_tokens=max_new_tokens,
            stop_strings=stop,
            tokenizer=self.loaded.tokenizer,
        )
        return self.decode(ids[0])

    def nll(self, ids: list[int]) -> Any:
        """Return the negative log-likelihoods of all tokens but the first, float32 [L - 1]."""
        chunk_size = self.chunk_size or 1024
        return document_nll(self.loaded.model, self.tensor(ids), chunk_size=chunk_size)

    def tensor(self, ids: list[int]) -> Any:
        """Return tokens as a batch of one, [1, L], on the model's device."""
        import torch

        return torch.tensor([ids], device=self.loaded.model.device)
