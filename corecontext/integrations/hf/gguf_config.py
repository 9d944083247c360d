"""Read a GGUF file's fields, and add to a config those that transformers drops: rope scaling, base
of the rotation, size of the heads."""

import copy
import math
from typing import Any

import torch

YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
SCALING = ("type", "factor", "original_context_length", "finetuned", "attn_factor", *YARN)
"""Fields of rope.scaling that are understood."""
ROPE = ("dimension_count", "freq_base", "dimension_count_swa", "freq_base_swa")
"""Other fields of rope that are understood."""
FREQUENCIES = "rope_freqs.weight"
"""Tensor of the factors by which Llama 3.1 divides its frequencies."""
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, by architecture: the scale of their attention counts hidden size /
number of heads, that of all others the length of a key. No field tells which."""


class GGUF:
    """The fields and tensors of a GGUF file.

    Args:
        reader: A `gguf.GGUFReader`.
    """

    def __init__(self, reader: Any) -> None:
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture"))

    def get(self, name: str) -> Any:
        """Return a field's value; None without it."""
        field = self._fields.get(name)
        return None if field is None else field.contents()

    def own(self, name: str) -> Any:
        """Return the value of a field whose prefix is the architecture; None without it."""
        return self.get(f"{self.architecture}.{name}")

    def names(self, prefix: str) -> list[str]:
        """Return what follows a prefix in the names of the architecture's fields."""
        start = f"{self.architecture}.{prefix}"
        return [name.removeprefix(start) for name in self._fields if name.startswith(start)]

    def values(self, name: str) -> torch.Tensor | None:
        """Return a float tensor's values; None without it."""
        tensor = self.tensors.get(name)
        return None if tensor is None else torch.tensor(tensor.data).float().flatten()


def set_rotation(file: GGUF, config: Any) -> None:
    """Give a config the rotation of its file's fields, which transformers drops.

    Raises:
        ValueError: the file has a rotation that is not known here.
    """
    rotations = rotations_of(config)
    full = rotations.get("full_attention", rotations.get(""))
    sliding = rotations.get("sliding_attention")
    if full is None:
        return
    for name, rotation in (("rope.freq_base", full), ("rope.freq_base_swa", sliding)):
        base = file.own(name)
        if base is not None and rotation is not None:
            rotation["rope_theta"] = float(base)
    scaling = _scaling(file, config)
    if scaling:
        full.update(scaling)


def set_head_size(file: GGUF, config: Any) -> None:
    """Give a config the size of its heads, and of Gemma the scale of its attention, which
    transformers drops or takes from other fields."""
    width = file.own("embedding_length")
    heads = file.own("attention.head_count")
    size = file.own("attention.key_length")
    has_two_sizes = file.own("attention.key_length_swa") is not None
    if not isinstance(heads, int) or width is None or has_two_sizes:
        return
    config.head_dim = int(size or width // heads)
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = file.own("block_count") == LAYERS_OF_27B.get(file.architecture)
        config.query_pre_attn_scalar = width // heads if is_27b else config.head_dim


def rotations_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rotations of a config, by the kind of layer; by "" if all layers have one."""
    rope = config.get_text_config(decoder=True).rope_parameters or {}
    nested = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    return nested or {"": rope}


def _scaling(file: GGUF, config: Any) -> dict[str, Any]:
    """Return the scaling of a file's rotation as transformers names it; {} without one."""
    known = {*(f"scaling.{name}" for name in SCALING), *ROPE}
    for name in file.names("rope."):
        if name not in known:
            raise ValueError(f"its rotation has the field {name!r}, which is not known here.")
    kind = file.own("rope.scaling.type") or "none"
    if file.values(FREQUENCIES) is not None:
        return _llama3(file, config)
    factor = float(file.own("rope.scaling.factor") or 1.0)
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"its rotation is scaled by {kind!r}; linear and yarn can be read.")
    length = file.own("rope.scaling.original_context_length") or file.own("context_length")
    scaling = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = int(length)
    for name, other in YARN.items():
        if (value := file.own(f"rope.scaling.{name}")) is not None:
            scaling[other] = float(value)
    if (value := file.own("rope.scaling.attn_factor")) is not None:
        # The file's factor comes on top of that of YaRN; transformers takes their product.
        scaling["attention_factor"] = float(value) * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3(file: GGUF, config: Any) -> dict[str, Any]:
    """Return the scaling of Llama 3.1, checked to give the file's frequencies. Of its numbers the
    file has the factor only: the largest divisor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = file.values(FREQUENCIES)
    assert divisors is not None, "the file has the tensor"
    scaling = {"rope_type": "llama3", "factor": round(float(divisors.max()), 3)}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {**rotations_of(config)[""], **scaling}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    expected = scaled.rope_parameters["rope_theta"] ** -exponents / divisors
    if not torch.allclose(frequencies, expected, rtol=1e-3):
        raise ValueError(f"its tensor {FREQUENCIES} has factors that are not those of Llama 3.1.")
    return scaling
