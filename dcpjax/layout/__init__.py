"""The layout of the KV cache, stated once: integer arithmetic for ints, NumPy and traced arrays.

Everything that needs to know where a token, a page, a layer or a head lives calls these functions;
the modules hold the formulas, their domain and the reasons.
"""

from dcpjax.layout.chunks import zigzag_chunks as zigzag_chunks
from dcpjax.layout.chunks import zigzag_place as zigzag_place
from dcpjax.layout.chunks import zigzag_size as zigzag_size
from dcpjax.layout.engines import place_part as place_part
from dcpjax.layout.interleave import active_mask as active_mask
from dcpjax.layout.interleave import filter_pages as filter_pages
from dcpjax.layout.interleave import global_page as global_page
from dcpjax.layout.interleave import global_position as global_position
from dcpjax.layout.interleave import local_filled as local_filled
from dcpjax.layout.interleave import local_index as local_index
from dcpjax.layout.interleave import local_page as local_page
from dcpjax.layout.interleave import max_local_filled as max_local_filled
from dcpjax.layout.interleave import owner as owner
from dcpjax.layout.interleave import page_owner as page_owner
from dcpjax.layout.interleave import slot_mapping as slot_mapping
from dcpjax.layout.interleave import window_order as window_order
from dcpjax.layout.interleave import window_rows as window_rows
from dcpjax.layout.interleave import write_slots as write_slots
from dcpjax.layout.layers import layer_owner as layer_owner
from dcpjax.layout.layers import layer_range as layer_range
from dcpjax.layout.layers import layer_slots as layer_slots
from dcpjax.layout.placement import KVPlacement as KVPlacement
from dcpjax.layout.placement import KVShare as KVShare
from dcpjax.layout.ranks import decode_dcp_rank as decode_dcp_rank
from dcpjax.layout.ranks import decode_groups as decode_groups
from dcpjax.layout.ranks import decode_head_group as decode_head_group
from dcpjax.layout.ranks import head_group as head_group
from dcpjax.layout.ranks import heads_per_rank as heads_per_rank
from dcpjax.layout.ranks import num_head_groups as num_head_groups
from dcpjax.layout.ranks import prefill_cp_rank as prefill_cp_rank
from dcpjax.layout.ranks import prefill_groups as prefill_groups
from dcpjax.layout.ranks import prefill_head_group as prefill_head_group
