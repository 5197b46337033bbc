"""Each kernel beside its JAX reference: the same arguments, the same results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dcpjax.attention
from dcpjax.attention.segment import segments_attention
from neuron.nki.attention import context_attention, decode_attention
from neuron.nki.merge import merge_partials


@dataclass(frozen=True)
class Pair:
    """``kernel`` has the reference's parameters and ``lnc``; results agree up to rounding."""

    kernel: Callable[..., Any]
    reference: Callable[..., Any]


PAIRS = {
    "decode": Pair(decode_attention, segments_attention),
    "context": Pair(context_attention, dcpjax.attention.segment_attention),
    "merge": Pair(merge_partials, dcpjax.attention.merge_partials),
}
