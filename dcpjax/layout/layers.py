"""Which layers a rank holds when the layers of a cache are split over ranks.

Layers stay in order; the first ranks take one layer more where the split is uneven. 78 layers on
8 ranks are six times 10 and twice 9. Kinds of arguments as in :mod:`dcpjax.layout.domain`.
"""

from dcpjax.layout.domain import Integers, check_below, maximum, minimum, static_count


def layer_range(num_layers: int, ranks: int, rank: Integers) -> tuple[Integers, Integers]:
    """The layers ``[start, stop)`` of ``rank``; empty for the last of more ranks than layers.

    Raises:
        LayoutError: a count or the rank is out of range.
    """
    base, extra = _split(num_layers, ranks)
    check_below("rank", rank, "ranks", ranks)
    start = rank * base + minimum(rank, extra)
    stop = (rank + 1) * base + minimum(rank + 1, extra)
    return start, stop


def layer_owner(layer: Integers, num_layers: int, ranks: int) -> Integers:
    """The rank whose range contains ``layer``.

    Raises:
        LayoutError: a count or the layer is out of range.
    """
    base, extra = _split(num_layers, ranks)
    check_below("layer", layer, "num_layers", num_layers)
    # Counted in the longer ranges of the first ranks, and in the shorter ones of the others: each
    # count is right in its own part and never too high in the other part.
    among_first = layer // (base + 1)
    among_others = (maximum(layer, extra) - extra) // max(base, 1)
    return maximum(among_first, among_others)


def layer_slots(num_layers: int, ranks: int, rank: Integers) -> Integers:
    """Layers that ``rank`` has room for: its own, and one transient layer of another rank.

    Raises:
        LayoutError: a count or the rank is out of range.
    """
    start, stop = layer_range(num_layers, ranks, rank)
    return stop - start + 1


def _split(num_layers: int, ranks: int) -> tuple[int, int]:
    ranks = static_count("ranks", ranks)
    return divmod(static_count("num_layers", num_layers, minimum=0), ranks)
