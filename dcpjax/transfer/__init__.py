"""KV transfers between engines that shard their caches each in their own way.

Plan (which rank sends what to which), bind (to pages and addresses), execute (a backend).
"""

from dcpjax.transfer.bind import BoundPath as BoundPath
from dcpjax.transfer.bind import BoundTransfer as BoundTransfer
from dcpjax.transfer.bind import StridedBlocks as StridedBlocks
from dcpjax.transfer.bind import bind as bind
from dcpjax.transfer.memory import RankMemory as RankMemory
from dcpjax.transfer.memory import SequenceMemory as SequenceMemory
from dcpjax.transfer.plan import TransferPath as TransferPath
from dcpjax.transfer.plan import TransferPiece as TransferPiece
from dcpjax.transfer.plan import TransferPlan as TransferPlan
from dcpjax.transfer.plan import plan_transfer as plan_transfer
