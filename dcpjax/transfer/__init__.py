"""KV transfers between engines that shard their caches each in their own way.

Plan (which rank sends what to which), bind (to pages and addresses), execute (a backend).
"""

from dcpjax.layout import filter_pages as filter_pages
from dcpjax.transfer.bind import bind as bind
from dcpjax.transfer.blocks import BoundPath as BoundPath
from dcpjax.transfer.blocks import BoundTransfer as BoundTransfer
from dcpjax.transfer.blocks import Landing as Landing
from dcpjax.transfer.blocks import StridedBlocks as StridedBlocks
from dcpjax.transfer.formulas import HeadAction as HeadAction
from dcpjax.transfer.formulas import neuron_head_action as neuron_head_action
from dcpjax.transfer.formulas import neuron_remote_ranks as neuron_remote_ranks
from dcpjax.transfer.formulas import pair_dcp_pages as pair_dcp_pages
from dcpjax.transfer.formulas import should_filter_cp_indices as should_filter_cp_indices
from dcpjax.transfer.formulas import transfer_page_size as transfer_page_size
from dcpjax.transfer.formulas import vllm_dcp_source_ranks as vllm_dcp_source_ranks
from dcpjax.transfer.formulas import vllm_tp_mapping as vllm_tp_mapping
from dcpjax.transfer.memory import RankMemory as RankMemory
from dcpjax.transfer.memory import SequenceMemory as SequenceMemory
from dcpjax.transfer.parts import PlacedPart as PlacedPart
from dcpjax.transfer.parts import plan_parts as plan_parts
from dcpjax.transfer.plan import TransferPath as TransferPath
from dcpjax.transfer.plan import TransferPiece as TransferPiece
from dcpjax.transfer.plan import TransferPlan as TransferPlan
from dcpjax.transfer.plan import plan_transfer as plan_transfer
from dcpjax.transfer.staging import StagingMemory as StagingMemory
from dcpjax.transfer.staging import num_staging_pages as num_staging_pages
