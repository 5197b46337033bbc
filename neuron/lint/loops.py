"""What is known about a while loop without running it: how often it runs, what it leaves alone."""

from dataclasses import dataclass

from neuron.lint.arithmetic import flipped
from neuron.lint.graph import Computation, Graph, Instruction, integer_literal
from neuron.lint.interval import LIMITS


@dataclass(frozen=True)
class Trip:
    """A loop that runs ``count`` times while its element ``index`` goes on by ``step``."""

    count: int
    index: int
    start: int
    step: int


def body(graph: Graph, loop: Instruction) -> Computation:
    return graph.called(loop)[0]


def condition(graph: Graph, loop: Instruction) -> Computation:
    return graph.called(loop)[1]


def find_trip(graph: Graph, loop: Instruction) -> Trip | None:
    """How often a loop runs, if that is a constant that can be read off it.

    Its condition compares one element of what it carries with a constant; the element starts at a
    constant and grows by a constant.
    """
    test = graph.resolve(graph.root(condition(graph, loop)))
    if test.opcode != "compare":
        return None
    left, right = (graph.resolve(operand) for operand in graph.operands(test))
    direction = test.comparison_direction
    if element_of(graph, left) is None:
        left, right, direction = right, left, flipped(direction)
    index, bound = element_of(graph, left), constant_value(graph, right)
    if index is None or bound is None or left.shape.element_type not in LIMITS:
        return None
    start, step = constant_value(graph, initial(graph, loop, index)), find_step(graph, loop, index)
    if start is None or not step:
        return None
    count = _count(direction, start, step, bound)
    if count is None or not _fits(left, start + count * step):
        return None
    return Trip(count, index, start, step)


def _count(direction: str, start: int, step: int, bound: int) -> int | None:
    """Smallest n for which ``start + n * step`` fails the comparison with the bound; None where
    that is none, or only comes after the counter has wrapped."""
    if direction == "NE":
        n, rest = divmod(bound - start, step)
        return n if n >= 0 and rest == 0 else None
    if direction == "EQ":
        return int(start == bound)
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
    is_up = direction in ("LT", "LE")
    if (start >= bound) if is_up else (start <= bound):
        return 0
    if (step > 0) != is_up:
        return None
    return -((start - bound) // step) if is_up else -((bound - start) // -step)


def _fits(instruction: Instruction, value: int) -> bool:
    """Whether an instruction's type has this value."""
    low, high = LIMITS.get(instruction.shape.element_type, (0, -1))
    return low <= value <= high


def element_of(graph: Graph, instruction: Instruction) -> int | None:
    """Which element of its computation's only parameter, a tuple, an instruction is."""
    if instruction.opcode != "get-tuple-element":
        return None
    source = graph.resolve(graph.operands(instruction)[0])
    return instruction.tuple_index if source.opcode == "parameter" else None


def initial(graph: Graph, loop: Instruction, index: int) -> Instruction | None:
    """What a loop starts with in one element."""
    start = graph.resolve(graph.operands(loop)[0])
    return graph.operands(start)[index] if start.opcode == "tuple" else None


def next_value(graph: Graph, loop: Instruction, index: int) -> Instruction | None:
    """What one run of a loop's body puts into one element."""
    result = graph.resolve(graph.root(body(graph, loop)))
    return graph.resolve(graph.operands(result)[index]) if result.opcode == "tuple" else None


def is_invariant(graph: Graph, loop: Instruction, index: int) -> bool:
    """Whether one element is the same in every run."""
    value = next_value(graph, loop, index)
    return value is not None and element_of(graph, value) == index


def find_step(graph: Graph, loop: Instruction, index: int) -> int | None:
    """The constant by which each run moves one element; 0 for those it leaves alone."""
    value = next_value(graph, loop, index)
    if value is None:
        return None
    if element_of(graph, value) == index:
        return 0
    if value.opcode not in ("add", "subtract"):
        return None
    left, right = (graph.resolve(operand) for operand in graph.operands(value))
    if value.opcode == "add" and element_of(graph, left) != index:
        left, right = right, left
    step = constant_value(graph, right)
    if element_of(graph, left) != index or step is None:
        return None
    return -step if value.opcode == "subtract" else step


def constant_value(graph: Graph, instruction: Instruction | None) -> int | None:
    """The value of a scalar that is a constant, also one that loops around it carry unchanged."""
    if instruction is None:
        return None
    source = graph.resolve(instruction)
    if source.opcode in ("convert", "reshape", "broadcast"):
        value = constant_value(graph, graph.operands(source)[0])
        return value if value is not None and _fits(source, value) else None
    index = element_of(graph, source)
    if index is not None:
        loop = _only_loop(graph, source)
        if loop is None or not is_invariant(graph, loop, index):
            return None
        return constant_value(graph, initial(graph, loop, index))
    values = integer_literal(source)
    return int(values.flat[0]) if values is not None and values.size == 1 else None


def _only_loop(graph: Graph, instruction: Instruction) -> Instruction | None:
    """The loop whose body or condition an instruction is in."""
    callers = graph.callers[graph.computation_of(instruction).id]
    return callers[0] if len(callers) == 1 and callers[0].opcode == "while" else None
