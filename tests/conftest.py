"""Fixtures shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when triton is first imported by whatever test



@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def default_device(device):
    """Make new tensors and models on the GPU where there is one, for tests that are written without devices."""
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)
