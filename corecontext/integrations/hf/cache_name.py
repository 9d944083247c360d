"""Name a model's cache as the installed transformers does: `cache` from 5.24 on, `past_key_values`
before."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

OLD_NAME = "past_key_values"
NAME = "cache" if "cache" in {x.name for x in fields(CausalLMOutputWithPast)} else OLD_NAME
"""Keyword argument of models and their layers, and field of their outputs."""


def with_cache(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that gives a model its cache."""
    return {NAME: cache}


def returned_cache(output: Any) -> Any:
    """Return the cache in a model's output."""
    return getattr(output, NAME)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache in keyword arguments of a model or layer, by either name, or None."""
    cache = arguments.get(NAME)
    return arguments.get(OLD_NAME) if cache is None else cache
