"""Models and text as the command line takes them: everything that can be wrong with them becomes
one clear line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.model_sizes import ModelSizes

METHODS = ("cca", "full")
WHOLE = "chunk-size must not be given with num-groups, which needs the whole text at once."
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, its tokenizer, and the attention it runs with."""

    model: Any
    tokenizer: Any
    config: CCAConfig | None
    """CCA's settings; None for full attention and for rivals that are no core tokens."""
    rival: Any = None
    """The settings of such a rival, from corecontext.baselines."""

    @property
    def max_length(self) -> int | None:
        """Most tokens that the model was built for, its rotary scaling considered; None where it
        does not say."""
        from corecontext.inference.limits import position_limit

        return position_limit(self.model.config)

    def sizes(self) -> dict[str, Any]:
        """What a record's params say of the model and its attention."""
        cca: dict[str, Any] = {}
        if self.config is not None:
            cca = {"group_size": self.config.group_size, "window_size": self.config.window_size}
            cca |= (
                {"cache_dtype": self.config.cache_dtype}
                if self.config.cache_dtype != "auto"
                else {}
            )
            cca |= {"sinks": self.config.sink_size} if self.config.sink_size else {}
            sizes = self.config.layer_group_sizes
            cca |= {"layer_group_sizes": list(sizes)} if sizes else {}
        if self.rival is not None:
            cca = {k: v for k, v in self.rival.to_dict().items() if v is not None}
        return {
            **ModelSizes.of(self.model.config)._asdict(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **cca,
        }


def load(
    name: str,
    *,
    method: str = "cca",
    group_size: int | None = None,
    window_size: int | None = None,
    sinks: int | None = None,
    patterns: str | None = None,
    cache_dtype: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    tensor_parallel: bool = False,
) -> Loaded:
    """Load a causal language model and give it CCA or a rival's attention, or leave it full
    attention.

    Args:
        name: A folder in the Hugging Face format, or an identifier on the hub.
        method: "cca", "full" or a name of corecontext.baselines.
        group_size, window_size: CCA's g and s; default what the checkpoint's config.json holds,
            else 16 and 1024. Rivals take those that they have.
        sinks: First tokens that StreamingLLM and LM-Infinite keep, or that CCA keeps raw
            (`CCAConfig.sink_size`); default what the checkpoint's config.json holds, else 0.
        patterns: File with MInference's patterns of this model.
        cache_dtype: How CCA's cache holds keys and values; default what the checkpoint's
            config.json holds, or "auto".
        dtype: A torch dtype by name; "auto" is float32 on a CPU and the checkpoint's own on a GPU.
        device: A torch device; "auto" is the first GPU, or the CPU.
        tensor_parallel: Split the model over the processes of torch.distributed, each on its
            device.

    Raises:
        UserError: the model is missing, broken, of an unsupported architecture, or a setting breaks
            a rule.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from corecontext.integrations.transformers import full_attention

    chosen = None
    if method not in METHODS:
        chosen = pick_rival(method, group_size, window_size, sinks, patterns)
    elif patterns is not None or (sinks is not None and method == "full"):
        raise UserError(
            f"sinks and patterns must be given for methods that have them, got method {method!r}."
        )
    check_dtype(dtype)
    if method != "cca" and cache_dtype is not None:
        raise UserError(f"cache-dtype must be given for method cca, got method {method!r}.")
    # Bad sizes fail before anything is loaded.
    cca_config(None, group_size, window_size, cache_dtype, sinks if method == "cca" else None)
    device = pick_device(device)
    wanted = "float32" if dtype == "auto" and device == "cpu" else dtype
    hf_config = load_config(name)
    if method != "full":
        check_architecture(hf_config)
    with one_line(
        f"the tokenizer of model '{name}' cannot be loaded (tokenizer.json, as a rule, lies beside "
        "config.json)"
    ):
        tokenizer = AutoTokenizer.from_pretrained(name)
    with one_line(f"model '{name}' cannot be loaded"):
        placed: dict[str, Any] = {}
        if tensor_parallel:
            from transformers.distributed import DistributedConfig

            placed = {"distributed_config": DistributedConfig(tp_plan="auto")}
        elif (
            getattr(hf_config, "quantization_config", None) is not None
        ):  # such weights are put in place at once
            placed = {"device_map": device}
        model: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=hf_config,
            dtype=wanted,
            attn_implementation=full_attention(hf_config),
            **placed,
        )
        (model if placed else model.to(device)).eval()
    config = None
    if method == "cca":
        config = cca_config(hf_config, group_size, window_size, cache_dtype, sinks)
        enable_cca(model, config)
    elif chosen is not None:
        from corecontext.baselines import enable

        with one_line():
            enable(model, chosen)
        if isinstance(chosen, CCAConfig):
            return Loaded(model, tokenizer, chosen)
    return Loaded(model, tokenizer, config, chosen)


def pick_rival(
    method: str,
    group_size: int | None,
    window_size: int | None,
    sinks: int | None,
    patterns: str | None,
) -> Any:
    """The settings of a rival by name.

    Raises:
        UserError: there is none of this name, or it has no such size.
    """
    from corecontext.baselines import NAMES, MInference, make_rival, read_patterns

    if method not in NAMES:
        raise UserError(
            f"method must be {', '.join((*METHODS, *NAMES[:-1]))} or {NAMES[-1]}, got {method!r}."
        )
    if patterns is not None and method != "minference":
        raise UserError(f"patterns must be given for minference, got method {method!r}.")
    with one_line():
        if patterns is not None:
            return MInference(read_patterns(patterns))
        sizes = {
            "group_size": group_size if method in ("mean", "max", "longlora") else None,
            "window_size": window_size if method not in ("minference", "longlora") else None,
            "sinks": sinks,
        }
        return make_rival(method, **sizes)


def load_config(name: str) -> Any:
    """The model's Hugging Face config.

    Raises:
        UserError: there is no such model.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings (long text, missing settings) are our own errors, in one line
    logging.disable_progress_bar()
    path = Path(name).expanduser()
    if path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        if not path.exists():
            raise UserError(
                f"model '{name}' does not exist. Give a folder with config.json, or an identifier on the "
                "Hugging Face hub."
            )
        if not (path / "config.json").is_file():
            raise UserError(f"model '{name}' must be a folder with config.json, got one without.")
    try:
        return AutoConfig.from_pretrained(name)
    except OSError as error:
        if path.exists():
            raise UserError(f"model '{name}' cannot be loaded: {first_line(error)}") from None
        raise UserError(
            f"model '{name}' was not found: it is no folder here, and the Hugging Face hub does not give "
            "it. Check the name, the network, and for gated models your login."
        ) from None
    except Exception as error:  # whatever is in config.json, or in the name
        raise UserError(f"model '{name}' cannot be loaded: {first_line(error)}") from None


def check_architecture(hf_config: Any) -> None:
    """Raise a UserError before weights are loaded, if `enable` would refuse the architecture
    after."""
    from corecontext.integrations.transformers import NO_FULL_ATTENTION, TESTED, full_layers

    if hf_config.model_type not in TESTED:
        raise UserError(
            f"architecture {hf_config.model_type!r} is not tested with CCA attention. "
            f"Tested: {', '.join(TESTED)}."
        )
    if not full_layers(hf_config):
        raise UserError(NO_FULL_ATTENTION.format(hf_config.num_hidden_layers))


def cca_config(
    hf_config: Any,
    group_size: int | None,
    window_size: int | None,
    cache_dtype: str | None = None,
    sinks: int | None = None,
) -> CCAConfig:
    """The checkpoint's saved CCA settings, or the defaults, with what the user gave put over
    them."""
    saved = getattr(hf_config, "cca", None)
    given = {
        k: v
        for k, v in (
            ("group_size", group_size),
            ("window_size", window_size),
            ("cache_dtype", cache_dtype),
            ("sink_size", sinks),
        )
        if v is not None
    }
    with one_line():
        return (CCAConfig.from_dict(saved) if saved else CCAConfig()).replace(**given)


def enable_cca(model: Any, config: CCAConfig) -> Any:
    """`corecontext.enable`, its refusals as one line."""
    from corecontext.integrations.transformers import enable

    with one_line():
        return enable(model, config)


def encode(loaded: Loaded, text: str, *, room_for: int = 0, at_least: int = 1) -> Any:
    """Token numbers of a text, [1, L], on the model's device.

    Raises:
        UserError: fewer than `at_least` tokens, or with `room_for` more the text exceeds the
            model's limit.
    """
    ids = loaded.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    count, limit = ids.shape[1], loaded.max_length
    if count < at_least:
        raise UserError(f"text must have at least {at_least} tokens, got {count}.")
    if limit is not None and count + room_for > limit:
        more = f" and {room_for} new ones" if room_for else ""
        raise UserError(
            f"text must fit the model's {limit} tokens, got {count}{more}. Shorten it"
            f"{', ask for fewer new tokens,' if room_for else ''} or take a model with a longer limit."
        )
    return ids.to(loaded.model.device)


def check_dtype(dtype: str) -> None:
    """Raise a UserError unless a model can be loaded in it."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}.")


def pick_device(device: str) -> str:
    """The device by name, "auto" resolved.

    Raises:
        UserError: no such device here.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"device must be auto, cpu or cuda, got {device!r}.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device {device!r} is not here: this machine or this PyTorch has no GPU. Use --device cpu."
        )
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {device!r} is not here: GPUs are counted from 0, and there are "
            f"{torch.cuda.device_count()}."
        )
    if kind not in ("cpu", "cuda"):
        try:
            torch.zeros(1, device=device).item()
        except Exception:  # PyTorch raises anything where a kind of device was not built in
            raise UserError(
                f"device {device!r} is not here, or holds no numbers. Use --device cpu."
            ) from None
    return device


@contextmanager
def one_line(prefix: str = "") -> Iterator[None]:
    """Turn the refusals of a library into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (
        RuntimeError
    ) as error:  # NotImplementedError is one: a refusal; others are bugs, or a broken checkpoint
        if is_out_of_memory(error) or not (prefix or isinstance(error, NotImplementedError)):
            raise
        raise UserError(_joined(prefix, first_line(error))) from None
    except (ValueError, TypeError, KeyError, OSError, ImportError) as error:
        raise UserError(_joined(prefix, first_line(error))) from None
    except Exception as error:
        if type(error).__module__.split(".")[0] not in (
            "safetensors",
            "tokenizers",
            "safetensors_rust",
        ):
            raise
        raise UserError(_joined(prefix, first_line(error))) from None


def is_out_of_memory(error: BaseException) -> bool:
    """True for what Python, a GPU and PyTorch's CPU allocator raise when memory runs out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def first_line(error: BaseException) -> str:
    """What an exception says, up to its first line break; its kind where it says nothing."""
    if isinstance(error, KeyError):
        return f"unknown {error}"
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def _joined(prefix: str, message: str) -> str:
    return f"{prefix}: {message}" if prefix else message
