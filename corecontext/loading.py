"""Load models and encode text for commands, with one clear line for each mistake."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from corecontext.config import MOST, CCAConfig, listed
from corecontext.files import UserError, first_line, one_line
from corecontext.integrations.hf.gguf_files import local_model, packed_config
from corecontext.integrations.hf.weights import check_finite, load_weights
from corecontext.methods import (
    CCA_SETTINGS,
    METHODS,
    cca_config,
    check_settings,
    cut_to_positions,
    field_of,
    name_of,
    pick_rival,
)
from corecontext.model_sizes import ModelSizes, check_counts
from corecontext.ops.spec import Spec
from corecontext.visibility import group_size_for

if TYPE_CHECKING:
    from corecontext.baselines.method import Method

WHOLE = "chunk-size must not be given with num-groups, which needs the whole text at once."
CHARACTERS_OF_TOKEN = 8
"""Characters of a token, more than the mean of most texts: `begins_too_long` encodes so many for
each token of the limit."""
CUT_TOKENS = 32
"""A text that is cut may have other tokens before the cut than the whole text: fewer than these."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """Hold a model that is ready to run, its tokenizer, and the attention it runs with."""

    model: Any
    tokenizer: Any
    config: CCAConfig | None
    """CCA's settings; None for full attention and for rivals."""
    rival: Any = None
    """The rival with its settings, a `Method` of corecontext.baselines; None for others."""
    adapted: bool = False
    """Whether the checkpoint's config.json has settings of CCA."""
    method: str = "cca"
    """Its name: "cca", "full" or a rival's."""

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model was built for, its rotary scaling included; None if it does
        not say."""
        from corecontext.inference.limits import position_limit

        return position_limit(self.model.config)

    def idle_note(self, length: int) -> str:
        """Return a note that on texts of at most `length` tokens the method is full attention,
        since all that a query sees is raw; "" where it is not."""
        fetched = 0
        if self.config is not None:
            s = self.config.window_size
            fetched = self.config.fetch_groups
            sinks = self.config.sink_size
            idle = all(
                Spec(g, s, 1.0, sink_size=sinks, fetch_groups=fetched).is_full(length)
                for g in _group_sizes(self.config, length)
            )
        else:
            s = getattr(self.rival, "window_size", 0)
            idle = length <= getattr(self.rival, "full_length", 0)
        if not idle:
            return ""
        name = self.method.replace("cca", "CCA")
        seen = f"window (s = {s})"
        options = "--window-size"
        if fetched:
            seen += f" and the groups that it fetches (k = {fetched})"
            options += " or --fetch-groups"
        return (
            f"{name} was idle: at most {length} tokens, within its {seen}: its numbers are those "
            f"of full attention. Take a longer text or a smaller {options}."
        )

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the model and its attention, by the names of a record's params."""
        params: dict[str, Any] = ModelSizes.of(self.model.config)._asdict()
        params["dtype"] = str(self.model.dtype).removeprefix("torch.")
        config = self.config
        if config is not None:
            params |= _used_settings(config)
        if self.rival is not None:
            given = self.rival.to_dict()
            params |= {name: value for name, value in given.items() if value is not None}
        return params


def _used_settings(config: CCAConfig) -> dict[str, Any]:
    """Return the settings of CCA that have an effect, by the names of their options."""
    idle = set()
    if not config.fetch_groups:
        idle.add("fetch_index")
    if not config.fetches_from_host:
        idle |= {"store", "fetch_slots"}
    used = {}
    for name in (*CCA_SETTINGS, "layer_group_sizes", "head_group_sizes"):
        value = getattr(config, field_of(name))
        if name not in idle and value not in (None, 0, "auto"):
            used[name] = list(value) if isinstance(value, tuple) else value
    return used


def load(
    name: str,
    *,
    method: str | Method = "cca",
    dtype: str = "auto",
    device: str = "auto",
    untested: bool = False,
    warn: bool = True,
    **settings: Any,
) -> Loaded:
    """Load a causal language model with CCA, a rival's attention or full attention.

    Args:
        name: A folder in the Hugging Face format, a GGUF file, "smollm2", or an identifier on the
            hub.
        method: "cca", "full", the name of a rival in corecontext.baselines, or a rival itself.
        dtype: A torch dtype by name; "auto" is float32 on a CPU and the checkpoint's own on a GPU.
        device: A torch device; "auto" is the first GPU, or the CPU.
        untested: Accept an architecture without tests, after a self-check.
        warn: Warn where core tokens are used without fetch by a model not trained with them.
        settings: Those of the method, by name (`methods.takes`). None takes the checkpoint's
            value, or else the method's default.

    Raises:
        UserError: the model is missing, broken, of an unsupported architecture, or a setting breaks
            a rule.
    """
    from transformers import AutoTokenizer

    from corecontext.inference.limits import position_limit

    # Bad settings fail before anything is loaded.
    check_settings(method, settings)
    check_dtype(dtype)
    device = pick_device(device)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    name = local_model(name)
    hf_config = load_config(name)
    if method != "full":
        check_architecture(hf_config, untested)
    rival = None
    if method not in METHODS:
        rival = pick_rival(method, settings)

    with one_line(
        f"the tokenizer of model '{name}' cannot be loaded (tokenizer.json is usually beside "
        "config.json)"
    ):
        tokenizer = AutoTokenizer.from_pretrained(name)
    with one_line(f"model '{name}' cannot be loaded"):
        model = _load_model(name, hf_config, dtype, device)
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > vocabulary:
        raise UserError(
            f"the tokenizer of model '{name}' must have at most the model's {vocabulary} entries, "
            f"got {tokenizer.vocab_size}. Take the model's own tokenizer."
        )

    if method == "full":
        return Loaded(model, tokenizer, None, method="full")
    from corecontext.baselines import enable

    config = rival
    if method == "cca":
        config = cca_config(hf_config, settings)
    config = cut_to_positions(config, position_limit(hf_config) or MOST)
    # Read before `enable` writes its settings there.
    adapted = getattr(hf_config, "cca", None) is not None
    with one_line():
        enable(model, config, untested=untested, warn=warn and method == "cca")
    if isinstance(config, CCAConfig):
        return Loaded(model, tokenizer, config, adapted=adapted, method=name_of(method))
    return Loaded(model, tokenizer, None, rival=config, adapted=adapted, method=name_of(method))


def _group_sizes(config: CCAConfig, length: int) -> set[int]:
    """Return every g that a layer or head has on a text of this length."""
    if config.num_groups is not None:
        return {group_size_for(length, config.window_size, config.num_groups)}
    sizes: set[int] = set()
    for size in config.layer_group_sizes or (config.head_group_sizes or config.group_size,):
        sizes.update((size,) if isinstance(size, int) else size)
    return sizes


def _load_model(name: str, hf_config: Any, dtype: str, device: str) -> Any:
    """Load a model onto a device, in evaluation mode and with the attention of its family."""
    options: dict[str, Any] = {}
    if getattr(hf_config, "quantization_config", None) is not None:
        options["device_map"] = device  # quantized weights cannot be moved later
    model = load_weights(name, hf_config, dtype, **options)
    if not options:
        model.to(device)
    check_finite(model, name)
    return model.eval()


def load_config(name: str, *, alone: bool = False) -> Any:
    """Load a model's Hugging Face config.

    Args:
        alone: Only the config is needed, not the weights: a GGUF file is not unpacked.

    Raises:
        UserError: there is no such model.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    # Its warnings (long text, missing settings) are our own errors, in one line.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if alone and (packed := packed_config(name)) is not None:
        return packed
    name = local_model(name)
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        if not path.exists():
            raise UserError(
                f"model '{name}' does not exist. Give a folder with config.json, or an identifier "
                "on the Hugging Face hub."
            )
        if not (path / "config.json").is_file():
            packed = next(path.glob("*.gguf"), None)
            hint = f" Give its GGUF file: --model '{packed}'." if packed else ""
            raise UserError(
                f"model '{name}' must be a folder with config.json, got one without.{hint}"
            )
    try:
        # Without a network transformers would try again for half a minute.
        is_offline = not path.exists() and not _reaches_hub()
        config = AutoConfig.from_pretrained(name, local_files_only=is_offline)
    except Exception as error:  # whatever is in config.json, or in the name
        if path.exists() or not isinstance(error, OSError):
            raise UserError(f"model '{name}' cannot be loaded: {first_line(error)}") from None
        raise UserError(
            f"model '{name}' was not found: it is no folder here, and the Hugging Face hub does "
            "not give it. Check the name, the network, and for gated models your login."
        ) from None
    check_counts(name, config.get_text_config(decoder=True))
    return config


def _reaches_hub() -> bool:
    """Whether the Hugging Face hub can be connected to; True, untried, behind a proxy."""
    from huggingface_hub.constants import ENDPOINT

    address = urlsplit(ENDPOINT)
    if getproxies():
        return True
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=3).close()
    except OSError:
        return False
    return True


def check_architecture(hf_config: Any, untested: bool = False) -> None:
    """Raise a UserError, before weights are loaded, for an architecture that `enable` refuses."""
    from corecontext.integrations.hf.attention_interface import (
        NO_FULL_ATTENTION,
        check_tested,
        full_layers,
    )

    with one_line():
        check_tested(hf_config, untested)
    if not full_layers(hf_config):
        raise UserError(NO_FULL_ATTENTION.format(hf_config.num_hidden_layers))


def encode(
    loaded: Loaded, text: str, *, room_for: int = 0, at_least: int = 1, special_tokens: bool = True
) -> Any:
    """Return the token numbers of a text, [1, L], on the model's device.

    Args:
        special_tokens: Whether the tokenizer adds its special tokens, as one for the beginning;
            False for a chat template's text, which has them.

    Raises:
        UserError: the text has fewer than `at_least` tokens, or with `room_for` more it exceeds the
            model's limit.
    """
    limit = loaded.max_length
    if limit is not None and begins_too_long(loaded.tokenizer, text, limit):
        raise _too_long(limit, f"more than {limit}", room_for)
    options = {"return_tensors": "pt", "verbose": False, "add_special_tokens": special_tokens}
    ids = loaded.tokenizer(text, **options)["input_ids"]
    count = ids.shape[1]
    if count < at_least:
        raise UserError(f"text must have at least {at_least} tokens, got {count}.")
    if limit is not None and count + room_for > limit:
        raise _too_long(limit, str(count), room_for)
    return ids.to(loaded.model.device)


def begins_too_long(tokenizer: Any, text: str, limit: int) -> bool:
    """Whether the beginning of a long text alone has more tokens than the limit, so that the rest
    need not be encoded."""
    size = CHARACTERS_OF_TOKEN * limit
    if len(text) <= size:
        return False
    ids = tokenizer(text[:size], add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) > limit + CUT_TOKENS


def _too_long(limit: int, count: str, room_for: int) -> UserError:
    """Return the error of a text of `count` tokens."""
    more = f" and {room_for} new ones" if room_for else ""
    fewer = ", ask for fewer new tokens," if room_for else ""
    return UserError(
        f"text must fit the model's {limit} tokens, got {count}{more}. Shorten it{fewer} or take a "
        "model with a longer limit."
    )


def check_dtype(dtype: str) -> None:
    """Raise a UserError unless it is the name of a dtype that a model can be loaded in."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be {listed(DTYPES)}, got {dtype!r}.")


def pick_device(device: str) -> str:
    """Return a device by name, "auto" resolved.

    Raises:
        UserError: the device is not available.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"device must be auto, cpu or cuda, got {device!r}.") from None
    missing = f"device {device!r} is not available"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{missing}: no GPU, or a CPU build of PyTorch. Use --device cpu.")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"{missing}: GPUs are counted from 0, and there are {torch.cuda.device_count()}."
        )
    if kind not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device).item()
        except Exception:  # PyTorch raises anything where a kind of device was not built in
            raise UserError(f"{missing}, or holds no numbers. Use --device cpu.") from None
    return device
