"""Cases for the kernels: a sequence in the pages of several ranks, and what each rank is given."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax.attention import attention_reference
from tests.attention.sequences import Tolerance, as_bits, deal, lay_out

LAYERS, LAYER = 2, 1
SCALE = 0.3  # not a power of two: bfloat16 would round it


@dataclass(frozen=True)
class Heads:
    query_heads: int
    kv_heads: int
    key_width: int
    value_width: int
    values_are_keys: bool = False  # the first columns of the keys, stored once (MLA)


@dataclass(frozen=True)
class Case:
    """A model's heads on some ranks; segments have ``width`` tokens, priors up to ``longest``."""

    heads: Heads
    ranks: int
    interleave: int
    page_size: int
    width: int
    longest: int
    dtype: str = "float32"
    has_layers: bool = False

    @property
    def settings(self) -> dict:
        layer = LAYER if self.has_layers else None
        return {
            "ranks": self.ranks,
            "interleave": self.interleave,
            "scale": SCALE,
            "layer": layer,
        }

    @property
    def num_entries(self) -> int:
        """One more than the longest sequence needs."""
        return -(-self.longest // (self.ranks * self.page_size)) + 1


@functools.cache
def sequence(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of the longest sequence, rounded to the case's type and held in float32."""
    random = np.random.default_rng(7)
    heads, length = case.heads, case.longest + case.width
    q = random.standard_normal((length, heads.query_heads, heads.key_width))
    k = random.standard_normal((length, heads.kv_heads, heads.key_width))
    v = random.standard_normal((length, heads.kv_heads, heads.value_width))
    if heads.values_are_keys:
        v = k[..., : heads.value_width]
    return tuple(x.astype(jnp.dtype(case.dtype)).astype(np.float32) for x in (q, k, v))


def rank_arguments(case: Case, prior: int, rank: int) -> tuple:
    """A rank's arguments of ``segment_attention``; whatever is not its own is NaN."""
    q, k, v = (x[prior : prior + case.width] for x in sequence(case))
    positions = np.arange(prior, prior + case.width, dtype=np.int32)
    hand = deal(prior + case.width, case.ranks, case.interleave)[rank]
    own = np.isin(positions, hand)[:, None, None]
    dtype = jnp.dtype(case.dtype)
    table, pages = _pages(case, prior, rank)
    return (
        jnp.asarray(q.astype(dtype)),
        jnp.asarray(pages),
        jnp.asarray(table),
        jnp.asarray(prior, jnp.int32),
        jnp.asarray(np.where(own, k, np.nan).astype(dtype)),
        jnp.asarray(np.where(own, v, np.nan).astype(dtype)),
        jnp.asarray(positions),
        rank,
    )


def _pages(case: Case, prior: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    _, k, v = sequence(case)
    laid_out = lay_out(
        k if case.heads.values_are_keys else np.concatenate([k, v], axis=-1),
        prior,
        ranks=case.ranks,
        interleave=case.interleave,
        page_size=case.page_size,
        num_entries=case.num_entries,
        generator=np.random.default_rng(5),
    )
    stored = as_bits(laid_out.rows[rank], jnp.dtype(case.dtype))
    if case.has_layers:
        nothing = as_bits(np.full_like(laid_out.rows[rank], np.nan), jnp.dtype(case.dtype))
        layers = [stored if layer == LAYER else nothing for layer in range(LAYERS)]
        stored = np.stack(layers, axis=1)
    return laid_out.table, stored


def dense(case: Case, prior: int) -> tuple[np.ndarray, np.ndarray]:
    """Dense attention of the segment's queries to the whole sequence."""
    q, k, v = sequence(case)
    length = len(k)
    positions = jnp.arange(length, dtype=jnp.int32)
    reference = jax.jit(functools.partial(attention_reference, scale=SCALE))
    out, lse = reference(*map(jnp.asarray, (q, k, v)), positions, positions)
    rows = slice(prior, prior + case.width)
    return np.asarray(out)[rows], np.asarray(lse)[rows]


def tolerance_of(case: Case) -> Tolerance:
    q, k, v = (np.abs(x) for x in sequence(case))
    score = SCALE * float(np.sum(q.max((0, 1)) * k.max((0, 1))))
    terms = case.longest + case.width + 8
    return Tolerance(case.heads.key_width, terms, score, float(v.max()), case.dtype == "bfloat16")
