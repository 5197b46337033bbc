"""How a model is spread over the mesh."""

from dataclasses import dataclass

from dcpjax.cache.rows import PLAIN, RowFormat
from dcpjax.form import DYNAMIC, StepForm
from dcpjax.mesh import HeadLayout


@dataclass(frozen=True)
class Sharding:
    """How a model is spread over the mesh, and how its ranks work and exchange results.

    ``has_whole_index``: every DCP rank keeps the indexer's keys of all tokens. ``latent_format``,
    ``index_format``: how rows of latents and of these keys are stored. ``pcp``: sets of ranks with
    all weights each, but for the experts, which all of them share.
    """

    heads: HeadLayout
    comm_backend: str = "ag_rs"
    prefill_gather: str = "none"
    form: StepForm = DYNAMIC
    has_whole_index: bool = False
    latent_format: RowFormat = PLAIN
    index_format: RowFormat = PLAIN
    pcp: int = 1

    @property
    def ranks(self) -> int:
        return self.heads.groups * self.heads.dcp

    @property
    def q_axis(self) -> str:
        """Logical axis of query heads; gathered queries need the group's weights on each rank."""
        return "group_q_heads" if self.prefill_gather == "q" else "q_heads"

    @property
    def q_shares(self) -> int:
        """Shares that the query heads are cut into."""
        return self.ranks if self.q_axis == "q_heads" else self.heads.groups

    @property
    def share_q_heads(self) -> int:
        """Query heads of one share, zeros included."""
        return self.heads.groups * self.heads.group_heads // self.q_shares
