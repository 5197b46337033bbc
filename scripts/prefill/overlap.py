"""What a compiled prompt step exchanges, and what may run beside the gather of a layer's copy.

Two exchanges of a layer are told by their shapes: the new rows of the chunk, which all ranks need
before they write, and the copy of the layer's prior tokens, where no rank has all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dcpjax.cache.pool import PoolShape
from dcpjax.engine.hlo_text import ArrayType, Instruction, array_types
from scripts.prefill.program import Program
from scripts.prefill.steps import PromptStep

COLLECTIVES = frozenset(
    name + suffix
    for name in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    for suffix in ("", "-start")
)


@dataclass(frozen=True)
class Exchanges:
    """Of one part of the cache, for each of its layers: gathers of new rows, and of copies."""

    layers: tuple[int, ...]
    rows: list[Instruction]
    copies: list[Instruction]


@dataclass(frozen=True)
class Overlap:
    """The gather of one layer's copy, and the layer before it; FLOPs of the busiest rank.

    Attributes:
        layer: whose copy it is.
        awaited: products that it waits for, but for what the layers before it write.
        beside: share of the layer before that waits for it as little as it waits for that.
        behind: share of the layer before that is scheduled behind it.
    """

    layer: int
    awaited: float
    beside: float
    behind: float


def exchanged(program: Program) -> list[ArrayType]:
    """The arrays that all collectives of a program make."""
    return [
        array
        for one in program.instructions
        if one.opcode in COLLECTIVES
        for array in array_types(one.type)
    ]


def find_exchanges(program: Program, step: PromptStep) -> dict[str, Exchanges]:
    """By part of the cache."""
    return {
        part.name: Exchanges(
            part.layers,
            _making(program, _rows_shape(step, step.pools.by_part[part.name])),
            _making(program, _copy_shape(step, step.pools.by_part[part.name])),
        )
        for part in step.blueprint.parts
    }


def _making(program: Program, dimensions: tuple[int, ...]) -> list[Instruction]:
    return [
        one
        for one in program.entry
        if one.opcode in COLLECTIVES
        and dimensions in [array.dimensions for array in array_types(one.type)]
    ]


def _rows_shape(step: PromptStep, pool: PoolShape) -> tuple[int, ...]:
    """Two chunks of each rank, see ``PairedBlock.gather_chunks``."""
    shape, ranks = step.shape, step.ranks
    chunk = shape.prefill_width // (2 * ranks)
    return (shape.prefill_rows, ranks, 2, chunk, pool.num_heads, pool.width)


def _copy_shape(step: PromptStep, pool: PoolShape) -> tuple[int, ...]:
    """Pages of all ranks side by side, or those of the one rank that has the layer."""
    pages = step.shape.prefill_rows * step.shape.table_width
    page = (pages, pool.num_heads, *pool.page_extent)
    return (step.ranks, *page) if step.config.residency == "sharded" else page


@dataclass(frozen=True)
class Dependencies:
    """Which instructions of a program need which, as sets of bits."""

    program: Program

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {one.name: number for number, one in enumerate(self.program.entry)}

    @cached_property
    def _needed(self) -> list[int]:
        needed: list[int] = []
        for one in self.program.entry:
            numbers = (self._numbers[word] for word in one.words if word in self._numbers)
            bits = 0
            for number in numbers:
                bits |= needed[number] | 1 << number
            needed.append(bits)
        return needed

    def before(self, one: Instruction) -> int:
        """What it needs, directly or not."""
        return self._needed[self._numbers[one.name]]

    def after(self, one: Instruction) -> int:
        """What needs it."""
        number = self._numbers[one.name]
        return sum(1 << n for n, bits in enumerate(self._needed) if bits >> number & 1)

    def scheduled_after(self, one: Instruction) -> int:
        """What stands behind it in the program."""
        return -1 << self._numbers[one.name] + 1

    def flops(self, bits: int, trips: Mapping[str, int]) -> float:
        """Of the products among some instructions."""
        return sum(
            self.program.flops(one, trips)
            for number, one in enumerate(self.program.entry)
            if bits >> number & 1
        )


def awaited_flops(
    program: Program, parts: Mapping[str, Exchanges], part: Exchanges
) -> dict[int, float]:
    """By layer but the first: what the copy waits for besides what the layers before it write.

    Every loop counts once: it is nothing, or it is not.
    """
    graph, once = Dependencies(program), dict.fromkeys(program.score_widths, 1)

    def awaited(layer: int, copy: Instruction) -> float:
        bits = graph.before(copy)
        for other in parts.values():
            for number, rows in zip(other.layers, other.rows, strict=True):
                bits &= ~graph.before(rows) if number < layer else -1
        return graph.flops(bits, once)

    copies = zip(part.layers, part.copies, strict=True)
    return {layer: awaited(layer, copy) for layer, copy in copies if layer}


def find_overlaps(
    program: Program, parts: Mapping[str, Exchanges], trips: Mapping[str, int]
) -> list[Overlap]:
    """For the copy of each layer but the first, in the part that all layers have: the first one.

    A layer is what the new rows of the next one need and its own do not.
    """
    graph, part = Dependencies(program), next(iter(parts.values()))
    awaited = awaited_flops(program, parts, part)

    def overlap(layer: int) -> Overlap:
        copy = part.copies[layer]
        body = graph.before(part.rows[layer]) & ~graph.before(part.rows[layer - 1])
        whole = graph.flops(body, trips)
        beside = body & ~graph.before(copy) & ~graph.after(copy)
        behind = body & graph.scheduled_after(copy)
        shares = (graph.flops(bits, trips) / whole for bits in (beside, behind))
        return Overlap(layer, awaited[layer], *shares)

    return [overlap(layer) for layer in range(1, len(part.copies))]
