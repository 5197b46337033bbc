"""A drafter on the devices for tests: proposes what last followed a token, in any sequence."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dcpjax.cache.pool import Pools
from dcpjax.engine.device_drafting import DraftInputs
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import NO_DRAFTS, Drafts, Request
from dcpjax.engine.step import StepShape, token_ids
from dcpjax.models.weights import PlacedModel
from dcpjax.speculation import num_accepted


class DeviceBigrams:
    """Keeps a table on the devices, which each step extends and reads without the host."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._table = jnp.zeros(vocab_size, jnp.int32)
        self._rows: Mapping[str, int] = {}

    def propose(self, request: Request, at_most: int) -> Drafts:
        """All that there is room for, where the last step has left drafts."""
        return Drafts(at_most) if request.request_id in self._rows else NO_DRAFTS

    def follow(self, step: DraftInputs, pools: Pools) -> tuple[Array, Pools]:
        """See :class:`dcpjax.engine.device_drafting.DeviceDrafter`."""
        assert step.hidden.shape == (step.shape.num_tokens, self._hidden_size)
        assert step.seeds.shape == (step.shape.rows, 2)
        self._rows = step.rows
        table = jax.device_put(self._table, step.sampled.sharding)
        previous, self._table = _follow(
            table, step.packed, step.previous, step.sampled, shape=step.shape
        )
        return previous, pools


@partial(jax.jit, static_argnames="shape")
def _follow(
    table: Array, packed: Array, previous: Array, sampled: Array, *, shape: StepShape
) -> tuple[Array, Array]:
    """The next rows of last token and drafts, and the table with what this step has seen."""
    views = shape.views(packed)
    width = shape.decode_width  # of an engine whose decode segments all have this one
    rows = previous.reshape(-1, width)
    tokens = token_ids(shape, views, rows)[: shape.num_decode_tokens].reshape(-1, width)
    split = shape.num_decode_tokens
    chosen = sampled[:split].reshape(-1, width)
    counts = num_accepted(tokens[:, 1:], chosen, views["num_tokens"][: shape.decode_rows] - 1)
    last = jnp.take_along_axis(chosen, counts[:, None], axis=1)[:, 0]
    last = jnp.concatenate([last, sampled[split : split + shape.prefill_rows]])
    table = table.at[tokens.reshape(-1)].set(chosen.reshape(-1))
    columns = [last]
    for _ in range(width - 1):
        columns.append(table[columns[-1]])
    new = jnp.stack(columns, axis=1)
    return jnp.pad(new, ((0, len(rows) - len(new)), (0, 0))).reshape(-1), table


class BigramEngine(Engine):
    """An engine with such a drafter, whatever its settings say of the method."""

    def _make_drafters(self, model: PlacedModel) -> tuple[Any, Any]:
        config = self.model_config
        drafter = DeviceBigrams(config.vocab_size, config.hidden_size)
        return drafter, drafter
