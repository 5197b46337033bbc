"""Attention over sharded pages. A rank's part is in ``segment``, what ranks exchange around it."""

from dcpjax.attention.merge import merge_partials as merge_partials
from dcpjax.attention.prefill import segmented_attention_cp as segmented_attention_cp
from dcpjax.attention.reference import attention_reference as attention_reference
from dcpjax.attention.segment import segment_attention as segment_attention
