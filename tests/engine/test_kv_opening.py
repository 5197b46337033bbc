"""The memory of several processes is that of one engine, whatever ranks each of them has."""

from collections.abc import Sequence

import msgspec
import pytest

from dcpjax.engine.kv_opening import ProcessMemory, join_memory
from dcpjax.transfer.memory import RankMemory


def region(rank: int, part: int) -> RankMemory:
    return RankMemory.dense(
        4096 * (rank + 1) + 2**20 * part,
        num_pages=5,
        num_layers=1,
        num_heads=1,
        page_size=4,
        token_bytes=8,
        device_id=rank % 2,
    )


def process(number: int, ranks: Sequence[int]) -> ProcessMemory:
    regions = {name: tuple(region(rank, part) for rank in ranks) for part, name in enumerate("ab")}
    return ProcessMemory(b"agent %d" % number, tuple(ranks), regions)


@pytest.mark.parametrize(
    "ranks_of", [[[0]], [[0, 1, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3], [2], [1], [0]]]
)
def test_each_rank_has_its_regions_and_its_agent(ranks_of: list[list[int]]):
    processes = [process(number, ranks) for number, ranks in enumerate(ranks_of)]
    sent = [msgspec.msgpack.encode(one) for one in processes]
    memory = join_memory([msgspec.msgpack.decode(one, type=ProcessMemory) for one in sent])
    assert memory.agents == tuple(one.agent for one in processes)
    agent_of = {rank: number for number, ranks in enumerate(ranks_of) for rank in ranks}
    for part, name in enumerate("ab"):
        assert list(memory.regions[name]) == [
            RankMemory(**{**vars(region(rank, part)), "agent": agent_of[rank]})
            for rank in sorted(agent_of)
        ]
