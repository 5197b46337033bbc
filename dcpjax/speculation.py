"""Speculation: what is proposed, and how much of it is accepted. Knows no engine, needs no JAX.

A step computes the last token of a sequence and ``D`` drafts behind it as one segment, and the
sampler chooses a token at each of its ``D + 1`` positions, from the logits there, with the noise of
the output index there. Position ``j`` has seen drafts ``1 … j``, so what is chosen there is what
the sequence goes on with if these are its tokens. Hence the rule of acceptance: *drafts count as
long as each is what was chosen before it; the first choice that no draft foretold counts as well.*

**Why the tokens are those of an engine without speculation.** Let ``t_i`` be output ``i`` of that
engine, a function of the tokens before it and of (seed, i); greedy choice is the case without
noise. Say ``t_0 … t_{i-1}`` are out, and drafts ``d_i …`` are verified. Position 0 has these
tokens and index ``i``: it chooses ``t_i``, which is put out. If ``d_i = t_i``, position 1 has the
tokens ``t_0 … t_i`` and index ``i + 1``: it chooses ``t_{i+1}``, and so on; if not, what is chosen
behind is thrown away. So every token put out is ``t``, by induction, whoever drafted what.

**It is rejection sampling.** A draft is a distribution ``q`` with all its mass on ``d``. Rejection
sampling accepts with probability ``min(1, p(d) / q(d)) = p(d)`` and draws from ``max(p − q, 0)``,
normalised, if not: ``p`` without ``d``. A draw from ``p`` that is compared with ``d`` does just
that: it equals ``d`` with probability ``p(d)``, and is distributed as ``p`` without ``d`` if not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Integers: TypeAlias = Any
"""A NumPy array or a JAX array of integers, traced or not; the result is of the same kind."""

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost from a hash modulo 2**64
_HASH_MASK = 2**64 - 1


def num_accepted(drafts: Integers, sampled: Integers, num_drafts: Integers) -> Integers:
    """How many drafts of each row were foretold rightly, before the first that was not: int32 [R].

    Args:
        drafts: [R, D] proposed tokens.
        sampled: [R, D + 1] what the sampler chose at the last token and behind each draft.
        num_drafts: [R] how many of a row's drafts are any; the others are padding.
    """
    module = drafts.__array_namespace__()
    is_draft = module.arange(drafts.shape[1], dtype=num_drafts.dtype)[None] < num_drafts[:, None]
    is_right = is_draft & (drafts == sampled[:, : drafts.shape[1]])
    # A minimum of float32: Neuron has no cumulative product, and no reduction of integers.
    places = module.arange(drafts.shape[1], dtype=np.float32)[None]
    missed = module.where(is_right, np.float32(drafts.shape[1]), places)
    return missed.min(axis=1, initial=drafts.shape[1]).astype(np.int32)


def num_accepted_synthetically(
    seeds: Integers, counters: Integers, num_drafts: Integers, mean_length: float
) -> Integers:
    """How many drafts to accept whatever they are: int32 [R]. For benchmarks: the text is wrong.

    ``mean_length − 1`` on average over the counters, rounded up or down by a hash; fewer where
    fewer were proposed.

    Args:
        seeds: uint32 [R, 2], those of the rows' sampling.
        counters: [R] index of the output token that is chosen first.
        mean_length: tokens per verification, the one behind the drafts included: at least 1.
    """
    whole, part = divmod(mean_length - 1, 1)
    threshold = np.uint32(min(part * 2**32, 2**32 - 1))
    is_one_more = _mix(seeds, counters) < threshold
    wanted = is_one_more.astype(np.int32) + np.int32(whole)
    return wanted.__array_namespace__().minimum(num_drafts.astype(np.int32), wanted)


def emitted(drafts: Integers, sampled: Integers, accepted: Integers) -> Integers:
    """The new tokens of each row: accepted drafts, then the one chosen behind them [R, D + 1].

    The first ``accepted + 1`` of a row count.
    """
    module = sampled.__array_namespace__()
    drafts = module.concat([drafts, sampled[:, -1:]], axis=1)
    is_draft = module.arange(sampled.shape[1], dtype=accepted.dtype)[None] < accepted[:, None]
    return module.where(is_draft, drafts, sampled)


def _mix(seeds: Integers, counters: Integers) -> Integers:
    """A hash of each row's seed and counter, uint32, every bit of which depends on all of them."""
    mixed = seeds[:, 0] ^ (counters.astype(np.uint32) * np.uint32(0x9E3779B9))
    return _spread(_spread(mixed) ^ seeds[:, 1])


def _spread(bits: Integers) -> Integers:
    """MurmurHash3's last step: each bit of a uint32 changes half of the others."""
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> np.uint32(16))


class NgramIndex:
    """Where the last tokens of one growing sequence were seen before.

    A proposal costs what the sequence has grown by, not what it is long: of each number ``n`` of
    tokens that is looked up, a sorted array of hashes has those that end in the prompt, and a dict
    those that end behind it. Hashes are not compared with the tokens again: a draft from a
    collision of 64 bits is as harmless as any other wrong one.
    """

    def __init__(self, prompt: Sequence[int], *, shortest: int, longest: int) -> None:
        """Index a prompt: once, at about 0.4 µs per token and ``n``.

        Args:
            shortest, longest: how many last tokens have to be found again, at least and at best.
        """
        self._prompt = np.asarray(prompt, np.uint64)
        # The one that ends with the prompt's last token is looked up first, and known later.
        known = self._prompt[:-1]
        sizes = range(longest, shortest - 1, -1)
        self._in_prompt = {n: _sorted_hashes(known, n) for n in sizes if n <= len(known)}
        self._behind: dict[int, dict[int, int]] = {n: {} for n in sizes}
        self._num_known = len(known)

    def propose(self, outputs: Sequence[int], at_most: int) -> tuple[int, ...]:
        """What followed the last tokens where they were seen last, the longest match first.

        If that was so recently that the sequence ends meanwhile, it goes on as it would by then:
        with what is proposed.

        Args:
            outputs: all tokens behind the prompt; it only grows from call to call.
            at_most: tokens that are wanted.

        Returns:
            ``at_most`` tokens, or none.
        """
        self._learn(outputs)
        for n in self._behind:
            if (stop := self._last_seen(n, outputs)) is not None:
                return self._copy(stop, outputs, at_most)
        return ()

    def _learn(self, outputs: Sequence[int]) -> None:
        """Know every n-gram that ends before the last token."""
        length = len(self._prompt) + len(outputs)
        for stop in range(self._num_known + 1, length):
            for n, ends in self._behind.items():
                if stop >= n:
                    ends[self._hash(stop - n, stop, outputs)] = stop
        self._num_known = max(self._num_known, length - 1)

    def _last_seen(self, n: int, outputs: Sequence[int]) -> int | None:
        """Where the last ``n`` tokens ended before: the position behind them, or None."""
        length = len(self._prompt) + len(outputs)
        if n >= length:
            return None
        wanted = self._hash(length - n, length, outputs)
        if (stop := self._behind[n].get(wanted)) is not None:
            return stop
        if n not in self._in_prompt:
            return None
        hashes, stops = self._in_prompt[n]
        place = int(np.searchsorted(hashes, np.uint64(wanted), side="right")) - 1
        return int(stops[place]) if place >= 0 and int(hashes[place]) == wanted else None

    def _copy(self, start: int, outputs: Sequence[int], count: int) -> tuple[int, ...]:
        length = len(self._prompt) + len(outputs)
        copied: list[int] = []
        for position in range(start, start + count):
            is_known = position < length
            copied.append(self._token(position, outputs) if is_known else copied[position - length])
        return tuple(copied)

    def _token(self, position: int, outputs: Sequence[int]) -> int:
        num_prompt = len(self._prompt)
        if position < num_prompt:
            return int(self._prompt[position])
        return outputs[position - num_prompt]

    def _hash(self, start: int, stop: int, outputs: Sequence[int]) -> int:
        return _hash_of(self._token(position, outputs) for position in range(start, stop))


def _hash_of(tokens: Iterable[int]) -> int:
    value = 0
    for token in tokens:
        value = (value * _MULTIPLIER + token + 1) & _HASH_MASK
    return value


def _sorted_hashes(tokens: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """:func:`_hash_of` all n-grams and the position behind each, ascending by both."""
    count = len(tokens) - n + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(n):
        hashes = hashes * np.uint64(_MULTIPLIER) + tokens[offset : offset + count] + np.uint64(1)
    order = np.argsort(hashes, kind="stable")
    return hashes[order], order + n


@dataclass
class AcceptanceCounts:
    """What became of drafts since the start. A verification is a segment with at least one draft.

    ``num_accepted_per_position[i]``: verifications that accepted more than ``i`` drafts. All that
    were right are counted, also those behind a token that ended its sequence.
    """

    max_drafts: int
    num_verifications: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_accepted_per_position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_accepted_per_position = [0] * self.max_drafts

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one segment."""
        if not num_drafts:
            return
        self.num_verifications += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1

    @property
    def mean_length(self) -> float:
        """Tokens per verification, the one behind the drafts included; 1 without any."""
        return 1.0 + self.num_accepted / max(self.num_verifications, 1)

    def as_stats(self) -> dict[str, Any]:
        """The counters by name."""
        return {
            "num_verifications": self.num_verifications,
            "num_draft_tokens": self.num_drafts,
            "num_accepted_tokens": self.num_accepted,
            "num_accepted_tokens_per_pos": list(self.num_accepted_per_position),
        }
