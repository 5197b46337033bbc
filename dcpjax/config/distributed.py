"""One engine as several processes: how many, which one this is, and where they meet."""

from dataclasses import dataclass

from dcpjax.config.checks import COUNT, FILLED, Rule, check_types
from dcpjax.errors import ConfigError, MeshError

_KNOWN_PORT = Rule(
    lambda value: 1 <= value <= 65535, "a port that all processes know, in [1, 65535]"
)


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of one engine. The names are those of vLLM.

    Each runs the same command with another ``node_rank`` and has an equal share of the ranks, the
    first one those from 0 on.

    Attributes:
        nnodes: processes of the engine.
        node_rank: which of them this is. 0 leads: it schedules and serves; the others follow.
        master_addr, master_port: where the leader listens for the others.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501

    def __post_init__(self) -> None:
        check_types(self)
        COUNT.check(self, "nnodes")
        FILLED.check(self, "master_addr")
        _KNOWN_PORT.check(self, "master_port")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                "node_rank is in [0, nnodes)", node_rank=self.node_rank, nnodes=self.nnodes
            )

    @property
    def is_alone(self) -> bool:
        return self.nnodes == 1

    @property
    def is_leader(self) -> bool:
        return self.node_rank == 0

    def local_ranks(self, ranks: int) -> int:
        """Ranks of each process.

        Raises:
            MeshError: they do not come out even.
        """
        if ranks % self.nnodes:
            raise MeshError(
                "the number of ranks is a multiple of nnodes", ranks=ranks, nnodes=self.nnodes
            )
        return ranks // self.nnodes
