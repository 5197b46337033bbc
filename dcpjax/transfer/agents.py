"""Transfers with an engine of several processes, each of which has an agent and some ranks' memory.

A backend moves bytes between two agents. What is bound for two engines is cut by the agents of the
other side, which takes nothing away and adds nothing, and is over when all parts are.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.errors import TransferError
from dcpjax.transfer.backend import FinalTransfer, TransferBackend, TransferHandle, TransferState
from dcpjax.transfer.blocks import BoundPath, BoundTransfer
from dcpjax.transfer.engine_info import EngineInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JointTransfer:
    """Submitted transfers as one. It has failed if one of them has, and only when all are over."""

    parts: Sequence[TransferHandle]

    def poll(self) -> TransferState:
        """See :class:`TransferHandle`."""
        states = [part.poll() for part in self.parts]  # all of them: who is asked may move on
        for state in (TransferState.MOVING, TransferState.FAILED):
            if state in states:
                return state
        return TransferState.DONE

    def release(self) -> None:
        """See :class:`TransferHandle`."""
        if self.poll() is TransferState.MOVING:
            raise TransferError("a transfer is released when nothing moves any more")
        for part in self.parts:
            part.release()


def connect(backend: TransferBackend, peer: EngineInfo) -> None:
    """Learn of all processes of an engine; of no effect where they are known.

    Raises:
        PeerError: one of them cannot be reached or is not understood.
    """
    for number, agent in enumerate(peer.agents):
        backend.connect(peer.agent_name(number), agent)


def disconnect(backend: TransferBackend, peer: EngineInfo) -> None:
    """Forget all processes of an engine. Idempotent.

    Raises:
        TransferError: a transfer with one of them is still moving.
    """
    for number in range(len(peer.agents)):
        backend.disconnect(peer.agent_name(number))


def submit(backend: TransferBackend, bound: BoundTransfer, peer: EngineInfo) -> TransferHandle:
    """Start moving the bytes between this process and those of a peer.

    Raises:
        PeerError: the peer is not connected.
        TransferError: it could not be started; nothing moves.
    """
    handles: list[TransferHandle] = []
    for agent, part in split_by_agent(bound, of_source=backend.pulls).items():
        try:
            handles.append(backend.submit(part, peer.agent_name(agent)))
        except TransferError as error:
            if not handles:
                raise
            # What has begun goes on, so this is one more state of the whole.
            _log.warning("agent %d of engine %s: %s", agent, peer.engine_id, error)
            handles.append(FinalTransfer(TransferState.FAILED))
            break
    return JointTransfer(handles)


def split_by_agent(bound: BoundTransfer, *, of_source: bool) -> dict[int, BoundTransfer]:
    """The paths of a transfer by the agent that has the rank at one of their ends.

    The ranks of both sides stay as they are, and what is left to do at landing is not repeated.

    Args:
        of_source: the end that counts; else the target's.
    """
    paths: dict[int, list[BoundPath]] = {}
    for path in bound.paths:
        source, target = bound.source_ranks[path.source_rank], bound.target_ranks[path.target_rank]
        paths.setdefault(source.agent if of_source else target.agent, []).append(path)
    return {
        agent: BoundTransfer(bound.source_ranks, bound.target_ranks, tuple(paths[agent]))
        for agent in sorted(paths)
    }
