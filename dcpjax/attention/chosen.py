"""Sparse attention in the form of the step: choose tokens, attend to what is chosen."""

from jax import Array
from jaxtyping import Float, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.indexer import ChosenPlaces, Query, choose_tokens
from dcpjax.attention.masked import masked_attention
from dcpjax.attention.sparse import sparse_attention
from dcpjax.attention.static_indexer import ChosenMask, choose_mask
from dcpjax.cache.rows import PLAIN, RowFormat
from dcpjax.form import StepForm

Choice = ChosenPlaces | ChosenMask
"""What each query of a block attends to, of the tokens that this rank has: [B, T, ...] each."""


def choose(
    query: Query,
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    keys: Block,
    tokens: Block,
    form: StepForm,
) -> Choice:
    """See :func:`dcpjax.attention.indexer.choose_tokens`."""
    if form.is_static:
        return choose_mask(query, pool, layer, keys, tokens, form)
    return choose_tokens(query, pool, layer, keys, tokens)


def attend_chosen(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    block: Block,
    choice: Choice,
    *,
    value_width: int,
    scale: float,
    form: StepForm,
    row_format: RowFormat = PLAIN,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """See :func:`dcpjax.attention.sparse.sparse_attention`."""
    sizes = {"value_width": value_width, "scale": scale, "row_format": row_format}
    if isinstance(choice, ChosenMask):
        return masked_attention(q, pool, layer, block, choice, form=form, **sizes)
    return sparse_attention(q, pool, layer, block, choice, **sizes)
