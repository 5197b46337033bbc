"""How the tensors of a checkpoint become the parameters of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from dcpjax.models.checkpoint import Checkpoint

Arrange = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Source:
    """What fills a parameter.

    Attributes:
        names: the tensors of the model or of one layer; of a stack, those of each element.
        arrange: how they become the parameter, or one element of it.
        stack: leading axes, one element each for several layers or experts.
    """

    names: tuple[tuple[str, ...], ...]
    arrange: Arrange
    stack: tuple[int, ...] = ()

    def read(self, checkpoint: Checkpoint, dtype: DTypeLike) -> np.ndarray:
        """The parameter without padding.

        Tensors are converted one by one, and a stack is filled one by one: the experts of a layer
        are never there as float32 all at once, nor twice.
        """
        first = self._element(0, checkpoint, dtype)
        if not self.stack:
            return first
        filled = np.empty((len(self.names), *first.shape), dtype)
        filled[0] = first
        for index in range(1, len(self.names)):
            filled[index] = self._element(index, checkpoint, dtype)
        return filled.reshape(*self.stack, *first.shape)

    def _element(self, index: int, checkpoint: Checkpoint, dtype: DTypeLike) -> np.ndarray:
        return self.arrange([np.asarray(checkpoint.read(n), dtype) for n in self.names[index]])


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
