"""One loop over the reads of all rows of a block, of which each is as long as it is.

Nested loops would make XLA copy the pool on JAX 0.9, and rows that are read together would all be
read as far as the longest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Integer

State = TypeVar("State")


def row_of(arrays: Any, row: Array) -> Any:
    """One row of all arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, 0, keepdims=False), arrays)


def set_row(arrays: State, row: Array, values: Any) -> State:
    """All arrays with one row replaced."""
    return jax.tree.map(
        lambda all_rows, one: lax.dynamic_update_index_in_dim(all_rows, one, row, 0),
        arrays,
        values,
    )


def for_each_read(
    trips: Integer[Array, " R"], body: Callable[[Array, Array, State], State], start: State
) -> State:
    """``body(row, number, state)`` for the numbers [0, trips[row]) of each row, row after row."""
    stops = jnp.cumsum(trips, dtype=jnp.int32)

    def read(index: Array, state: State) -> State:
        row = jnp.sum((index >= stops).astype(jnp.int32), dtype=jnp.int32)
        first = row_of(stops, row) - row_of(trips, row)
        return body(row, index - first, state)

    return lax.fori_loop(0, stops[-1], read, start)


@dataclass(frozen=True)
class Reads:
    """Whole pages read one after the other, so many at a time."""

    pages: int
    page_size: int

    @classmethod
    def of(cls, page_tables: Array, page_size: int, tokens: int) -> "Reads":
        """About ``tokens`` at a time, at most what a table has."""
        return cls(max(1, min(tokens // page_size, page_tables.shape[-1])), page_size)

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    def num_reads(self, page_tables: Integer[Array, "R M"]) -> int:
        """Until all pages of a table are read."""
        return -(-page_tables.shape[-1] // self.pages)

    def pages_of(self, table: Integer[Array, " M"], number: Array) -> tuple[Array, Array]:
        """The page ids of one read, and the index of its first token."""
        table = jnp.pad(table, (0, -table.shape[0] % self.pages), mode="edge")
        number = number.astype(jnp.int32)
        ids = lax.dynamic_slice(table, (number * self.pages,), (self.pages,))
        return ids, number * self.tokens

    def run(
        self,
        held: Integer[Array, " R"],
        body: Callable[[Array, Array, State], State],
        start: State,
    ) -> State:
        """:func:`for_each_read` over the reads of rows with so many tokens."""
        trips = ((held + self.tokens - 1) // self.tokens).astype(jnp.int32)
        return for_each_read(trips, body, start)
