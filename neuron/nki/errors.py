"""What the kernels' callers can meet.

NkiError
├── NkiMissingError          the nki package is not there
└── NkiShapeError (ValueError)   operands that the kernels are not made for
"""

from neuron.errors import NeuronError


class NkiError(NeuronError):
    """Root of the errors of the NKI kernels."""


class NkiMissingError(NkiError):
    """The nki package cannot be imported."""


class NkiShapeError(NkiError, ValueError):
    """A kernel is not made for these shapes or types: refused before anything is compiled."""
