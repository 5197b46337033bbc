"""How the tensors of a checkpoint become the parameters of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.models.checkpoint import Checkpoint

Arrange = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Source:
    """What fills a parameter: the tensors of the model or of one layer, or of each layer."""

    names: tuple[tuple[str, ...], ...]
    arrange: Arrange
    is_stacked: bool = False

    def read(self, checkpoint: Checkpoint) -> np.ndarray:
        """The parameter without padding."""
        arranged = [self.arrange([checkpoint.read(name) for name in names]) for names in self.names]
        return np.stack(arranged) if self.is_stacked else arranged[0]


def as_stored(tensors: Sequence[np.ndarray]) -> np.ndarray:
    (tensor,) = tensors
    return tensor


def transposed(tensors: Sequence[np.ndarray]) -> np.ndarray:
    (tensor,) = tensors
    return tensor.T


def side_by_side(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Several [N, E] to [E, several, N]."""
    return np.stack(tensors).transpose(2, 0, 1)


def take_heads(by_head: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Heads [heads, ...] in the order of ``source``, zeros where it is negative."""
    zero = np.zeros_like(by_head[:1])
    return np.concatenate([by_head, zero])[np.where(source < 0, len(by_head), source)]
