"""One rank of several processes that try to agree; says in JSON lines what became of each try.

usage: consensus_process.py RANK RANKS PORTS, one port for each of TRIES, separated by commas
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcpjax.config import DistributedConfig
from dcpjax.engine.consensus import Consensus, State, Statement
from dcpjax.engine.joining import join
from dcpjax.engine.link import Link
from dcpjax.engine.link_reduction import LinkReduction
from dcpjax.errors import DcpjaxError

RANK, RANKS, PORTS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")


@dataclass(frozen=True)
class Try:
    """What one rank has to say, how much its rows hold, and how long it takes."""

    observe: Callable[[int], Statement]
    capacity: Callable[[int], int] = lambda rank: 4
    seconds: Callable[[int], float] = lambda rank: 0.0
    timeout: float = 60.0


def _raise(rank: int) -> Statement:
    return Statement(polls={1: State(rank // (rank - 1))})


MATCHED = (2048, 2045, 2100)
TRIES = {
    "prefixes": Try(lambda rank: Statement(claims={7: MATCHED[rank]})),
    "nothing": Try(lambda rank: Statement()),
    "an empty queue": Try(lambda rank: Statement(polls={} if rank == 1 else {1: State.DONE})),
    "a raising poll": Try(_raise),
    "another count": Try(lambda rank: Statement(), capacity=lambda rank: 4 + rank),
    "slow": Try(
        lambda rank: Statement(claims={7: MATCHED[rank]}), seconds=lambda rank: 0.5 * (rank == 1)
    ),
    "silent": Try(
        lambda rank: Statement(), seconds=lambda rank: 3.0 * (rank == 1), timeout=0.3
    ),
}  # fmt: skip


def attempt(one: Try, port: int) -> dict[str, object]:
    link = Link(DistributedConfig(RANKS, RANK, "127.0.0.1", port))
    try:
        join(link, DistributedConfig(RANKS, RANK, "127.0.0.1", port), {})
        reduction = LinkReduction(link, one.timeout)
        consensus = Consensus(reduction, capacity=one.capacity(RANK), page_size=16)
        time.sleep(one.seconds(RANK))
        decision = consensus.tick(lambda: one.observe(RANK))
        return {"prefixes": list(decision.prefixes.items())}
    except (DcpjaxError, ZeroDivisionError) as error:
        link.fail(str(error))
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        link.close()


for (name, one), port in zip(TRIES.items(), PORTS, strict=True):
    print(json.dumps({name: attempt(one, int(port))}), flush=True)
