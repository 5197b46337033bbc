"""The collectives of a step as data: what is exchanged, by how many ranks, how large, how often."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dcpjax.planner.hardware import Device, collective_seconds

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-to-all", "all-reduce"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        purpose: what is exchanged.
        ranks: size of a group.
        num_bytes: the whole message: the gathered result, what is scattered or summed, all that a
            rank exchanges.
        count: times per step.
    """

    kind: CollectiveKind
    purpose: str
    ranks: int
    num_bytes: int
    count: int

    def seconds(self, device: Device) -> float:
        """All of a step's."""
        return self.count * collective_seconds(self.kind, self.ranks, self.num_bytes, device)


@dataclass(frozen=True)
class Traffic:
    """What a step exchanges."""

    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, collectives: Iterable[Collective]) -> "Traffic":
        """Without those that no program has: of one rank, of nothing, or never."""
        return cls(tuple(c for c in collectives if c.ranks > 1 and c.num_bytes and c.count))

    @property
    def num_messages(self) -> int:
        return sum(item.count for item in self.collectives)

    @property
    def num_bytes(self) -> int:
        return sum(item.count * item.num_bytes for item in self.collectives)

    def seconds(self, device: Device) -> float:
        return sum(item.seconds(device) for item in self.collectives)

    def latency(self, device: Device) -> float:
        """What of these seconds is the same for messages of no bytes."""
        return sum(replace(item, num_bytes=0).seconds(device) for item in self.collectives)


@dataclass(frozen=True)
class StepTokens:
    """What a step computes on one copy of the attention, padding included.

    Attributes:
        decode_rows, decode_width: sequences that are generated, and the tokens of each: the last
            one and its drafts.
        prompt_rows, prompt_width: chunks of prompts, and the tokens of each.
        context: tokens that the page table of each sequence has room for.
        is_expanded: prompts of a latent cache meet keys and values of each head.
    """

    decode_rows: int = 0
    decode_width: int = 1
    prompt_rows: int = 0
    prompt_width: int = 0
    context: int = 0
    is_expanded: bool = False

    @property
    def decode(self) -> int:
        """Tokens of all decode segments."""
        return self.decode_rows * self.decode_width

    @property
    def prompt(self) -> int:
        """Tokens of all chunks."""
        return self.prompt_rows * self.prompt_width

    @property
    def outputs(self) -> int:
        """Tokens that are chosen: behind each one of decode, and behind each chunk."""
        return self.decode + self.prompt_rows

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.decode_rows + self.prompt_rows
