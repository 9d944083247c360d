"""Mean and max pooling: our own operators with another way to make core tokens."""

from __future__ import annotations

from functools import partial

from corecontext.config import CCAConfig

mean_pooling = partial(CCAConfig, pooling="mean")
max_pooling = partial(CCAConfig, pooling="max")
