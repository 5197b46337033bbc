"""Which shapes of a step are compiled: sequences × context × tokens. Pure integer arithmetic.

On Neuron a program's shapes and trip counts are static, so a step reads as much context as its
bucket has, whatever the sequences' lengths are. With one bucket of the longest length each short
sequence would pay for the longest one; with many, the compiler runs for days. Sizes grow by a
factor, so a bucket is never larger than that factor times what it is used for:

    context, virtual page 64, longest 1000:  512  1024
    sequences, at most 6:                    1  2  4  6
    chunks, at most 512, of whole stripes:   128  512

A bucket's **context** is what its page table covers: a sequence with this step's tokens. So a
sequence of length n, after the step, fits where n is at most the context.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError
from neuron.program import ProgramKind

MAX_PROGRAMS = 96
"""More programs than this are refused unless asked for. One takes the compiler minutes, large ones
up to an hour."""


@dataclass(frozen=True)
class BucketSettings:
    """The limits of an engine, and how finely they are divided.

    Attributes:
        max_num_seqs, max_model_len, max_num_batched_tokens, block_size, dcp, interleave: as the
            engine has them.
        segment_tokens: widths of multi-token segments (verification of drafts), each above 1.
        page_counts: pages that one transfer program gathers or scatters at once.
        context_alignment: contexts are multiples of it, and of the virtual page. NKI kernels want
            a multiple of 128 tokens on each rank: 128 · dcp.
        least_context, least_chunk: the smallest sizes, before they are aligned.
        context_growth, sequence_growth, chunk_growth: each size is this times the one before.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int = 16
    dcp: int = 1
    interleave: int = 1
    segment_tokens: tuple[int, ...] = ()
    page_counts: tuple[int, ...] = ()
    context_alignment: int = 1
    least_context: int = 512
    least_chunk: int = 128
    context_growth: int = 2
    sequence_growth: int = 2
    chunk_growth: int = 4

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 2 if item.name.endswith(("_growth", "_tokens")) else 1
            sizes = value if isinstance(value, tuple) else (value,)
            if item.name == "max_num_batched_tokens":
                least = self.dcp * self.interleave
            if any(size < least for size in sizes):
                raise ConfigError(f"{item.name} is at least {least}", **{item.name: value})

    @classmethod
    def of_engine(cls, config: EngineConfig, max_model_len: int, **others: Any) -> "BucketSettings":
        """The settings of an engine whose longest sequence is known."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            dcp=config.decode_context_parallel_size,
            interleave=config.interleave,
            **others,
        )

    @property
    def virtual_page_size(self) -> int:
        return self.block_size * self.dcp


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one step: so many sequences, tokens of each of them, and context of each.

    ``table_width`` is the context in virtual pages.
    """

    kind: ProgramKind
    sequences: int
    tokens: int
    context: int
    table_width: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.sequences}x{self.tokens}_ctx{self.context}"

    @property
    def cost(self) -> int:
        """Proportional to the work of attention: pairs of a query and a key."""
        return self.sequences * self.tokens * self.context


@dataclass(frozen=True)
class Buckets:
    """All programs of an engine: ``steps``, and one gather and one scatter for each page count."""

    steps: tuple[Bucket, ...]
    page_counts: tuple[int, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Programs of each kind, which is how often the compiler runs."""
        counts = Counter[str](bucket.kind for bucket in self.steps)
        for kind in ("page_gather", "page_scatter"):
            counts[kind] = len(self.page_counts)
        return {kind: count for kind, count in counts.items() if count}

    @property
    def num_programs(self) -> int:
        return sum(self.counts.values())

    def find(self, kind: ProgramKind, *, sequences: int, tokens: int, length: int) -> Bucket:
        """The cheapest bucket for so many sequences, of which the longest has ``length`` tokens.

        Args:
            tokens: most tokens of a sequence in this step.
            length: with these tokens.

        Raises:
            ConfigError: the step is larger than the limits that the buckets were made for.
        """
        fitting = [
            bucket
            for bucket in self.steps
            if bucket.kind == kind
            and bucket.sequences >= sequences
            and bucket.tokens >= tokens
            and bucket.context >= length
        ]
        if not fitting:
            raise ConfigError(
                "a step fits into a bucket",
                kind=kind,
                sequences=sequences,
                tokens=tokens,
                length=length,
            )
        return min(fitting, key=lambda bucket: (bucket.cost, bucket))


def make_buckets(settings: BucketSettings, *, max_programs: int = MAX_PROGRAMS) -> Buckets:
    """The buckets that hold every step within the limits.

    Raises:
        ConfigError: they are more than ``max_programs``.
    """
    steps = [*_decode(settings), *_segments(settings), *_prefill(settings)]
    buckets = Buckets(tuple(steps), tuple(sorted(set(settings.page_counts))))
    refuse_too_many(buckets.counts, max_programs)
    return buckets


def refuse_too_many(counts: Mapping[str, int], max_programs: int) -> None:
    """Raise ConfigError where so many programs of each kind are more than ``max_programs``."""
    programs = sum(counts.values())
    if programs > max_programs:
        raise ConfigError(
            "the compiler runs once for each program, and these are too many: take fewer sequences "
            "or a shorter context, or a higher limit",
            max_programs=max_programs,
            programs=programs,
            **counts,
        )


def _decode(settings: BucketSettings) -> Iterator[Bucket]:
    for sequences in _sequence_sizes(settings):
        for context in _contexts(settings):
            yield _bucket(settings, "decode", sequences, 1, context)


def _segments(settings: BucketSettings) -> Iterator[Bucket]:
    for tokens in sorted(set(settings.segment_tokens)):
        for sequences in _sequence_sizes(settings):
            for context in _contexts(settings, above=1):
                yield _bucket(settings, "segment", sequences, tokens, context)


def _prefill(settings: BucketSettings) -> Iterator[Bucket]:
    """Chunks of one sequence. A larger chunk is only taken for more tokens than a smaller one has,
    so it needs no context that is shorter than that."""
    smaller = 0
    for tokens in _chunks(settings):
        for context in _contexts(settings, above=smaller):
            yield _bucket(settings, "prefill", 1, tokens, context)
        smaller = tokens


def _bucket(
    settings: BucketSettings, kind: ProgramKind, sequences: int, tokens: int, context: int
) -> Bucket:
    return Bucket(kind, sequences, tokens, context, context // settings.virtual_page_size)


def _sequence_sizes(settings: BucketSettings) -> list[int]:
    return _sizes(1, settings.max_num_seqs, settings.sequence_growth)


def _contexts(settings: BucketSettings, above: int = 0) -> list[int]:
    """Contexts that hold sequences of more than ``above`` tokens."""
    unit = math.lcm(settings.virtual_page_size, settings.context_alignment)
    least, most = (
        _rounded_up(tokens, unit) for tokens in (settings.least_context, settings.max_model_len)
    )
    sizes = _sizes(least, most, settings.context_growth)
    return [context for context in sizes if context > above]


def _chunks(settings: BucketSettings) -> list[int]:
    """Widths of whole stripes, so that every window holds as many tokens of each rank."""
    stripe = settings.dcp * settings.interleave
    batched = settings.max_num_batched_tokens // stripe * stripe
    most = min(batched, _rounded_up(settings.max_model_len, stripe))
    return _sizes(_rounded_up(settings.least_chunk, stripe), most, settings.chunk_growth)


def _sizes(least: int, most: int, growth: int) -> list[int]:
    """Sizes from ``least`` on, each ``growth`` times the one before, and ``most`` as the last."""
    sizes: list[int] = []
    size = least
    while size < most:
        sizes.append(size)
        size *= growth
    return [*sizes, most]


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
