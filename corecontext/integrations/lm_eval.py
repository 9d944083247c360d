"""Add a model `corecontext` to lm-evaluation-harness's command.

    python -m corecontext.integrations.lm_eval run --model corecontext --tasks mmlu
        --model_args pretrained=DIR,fetch_groups=128

The plain `lm_eval` command does not have the model, since the harness knows only models that were
imported. For full attention use the harness's `--model hf`. Needs the extra 'lm-eval'.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from corecontext.config import CCAConfig
from corecontext.files import UserError, install_command
from corecontext.integrations.hf.attention_interface import full_attention
from corecontext.integrations.hf.enabling import enable

MODEL = "corecontext"
SETTINGS = tuple(field.name for field in dataclasses.fields(CCAConfig) if field.name != "backend")
"""Model arguments that are CCA's settings; `backend` is an argument of the harness's own."""


@functools.cache
def register() -> type:
    """Register the model with the harness, once; return its class.

    Raises:
        UserError: the harness is not installed.
    """
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"lm_eval must be installed, got: {error}. Install it with: "
            f"{install_command('lm-eval')}"
        ) from None

    @register_model(MODEL)
    class CoreContextLM(HFLM):
        """A Hugging Face model under CCA: settings by argument, else the checkpoint's, else the
        defaults."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.prefix_token_id is None:
                raise UserError(
                    "the tokenizer must have a token that ends or begins a text, got none: the "
                    "harness puts one before an empty context."
                )

        def _create_model(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
            given = {name: kwargs.pop(name) for name in SETTINGS if name in kwargs}
            try:
                CCAConfig(**given)  # bad sizes fail before anything is loaded
                super()._create_model(
                    pretrained, *args, attn_implementation=full_attention(self._config), **kwargs
                )
                enable(self._model, CCAConfig.saved_in(self._model.config).replace(**given))
                # Tasks score texts, which are no prompts: no cache. Generation asks for its own.
                self._model.config.use_cache = False
            except (ValueError, TypeError, NotImplementedError, OSError) as error:
                raise UserError(f"model '{pretrained}' cannot be used: {error}") from error

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            if self._model.config.cca["num_groups"] and inps.shape[0] > 1:
                raise UserError(
                    f"batch_size must be 1 with num_groups, got {inps.shape[0]}: the harness fills "
                    "rows up without a mask, and g would follow the longest."
                )
            return super()._model_call(inps, attn_mask, labels)

    return CoreContextLM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness's command line; return 0, or 2 after a one-line error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    before = sys.argv
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["corecontext.integrations.lm_eval", *arguments]
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    from corecontext.integrations import lm_eval  # not __main__: the harness registers a class once

    sys.exit(lm_eval.main())
