"""Where one engine keeps one part of its cache, by its sizes alone; pools and plans ask here."""

from dcpjax.layout.placement import KVPlacement


def place_part(
    tp: int,
    dcp: int,
    pcp: int = 1,
    *,
    layers: int,
    kv_heads: int,
    page_size: int,
    interleave: int,
    is_whole: bool = False,
    splits_layers: bool = False,
    is_prefill_order: bool = False,
) -> KVPlacement:
    """The placement of one part over ``tp * pcp`` ranks.

    Args:
        page_size: tokens of a page that is one of ``dcp`` ranks' share of a virtual page.
        is_whole: every rank keeps all tokens and layers of the part, as without DCP: its pages are
            as long as those of all DCP ranks together.
        splits_layers: PCP ranks have all tokens of their own layers of the part.
        is_prefill_order: DCP ranks lie far apart; without PCP only.

    Raises:
        LayoutError: sizes that do not divide.
    """
    size = {"layers": layers, "kv_heads": kv_heads}
    if is_whole:
        page = page_size * dcp
        return KVPlacement.pcp_dcp(tp, pcp, 1, **size, page_size=page, interleave=page)
    if splits_layers:
        return KVPlacement.layer_split(pcp, tp=tp, **size, page_size=page_size)
    dealt = {**size, "page_size": page_size, "interleave": interleave}
    if pcp > 1:
        return KVPlacement.pcp_dcp(tp, pcp, dcp, **dealt)
    make = KVPlacement.prefill_dcp if is_prefill_order else KVPlacement.decode
    return make(tp, dcp, **dealt)
