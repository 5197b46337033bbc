"""Kernels on the NumPy emulation of NKI."""

from collections.abc import Iterator

import pytest

from tests.neuron.nki import emulation
from tests.neuron.nki.emulated_memory import Launch


@pytest.fixture
def emulated() -> Iterator[Launch]:
    """``import nki`` gives the emulation; what the last kernel used."""
    with emulation.installed() as launch:
        yield launch
