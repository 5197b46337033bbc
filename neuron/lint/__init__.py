"""Every rule of neuronx-cc, the Neuron runtime and the hardware that can be seen in a program.

``lint`` names each broken rule with the line of our code that broke it. The rules stand in modules
by theme, each with the error that it prevents and where it is written.
"""

from collections.abc import Iterable, Iterator

from neuron.lint import collectives, dtypes, identifiers, indices, opcodes, shapes
from neuron.lint.graph import Graph
from neuron.lint.model import Context as Context
from neuron.lint.model import Finding as Finding
from neuron.lint.model import Found as Found
from neuron.lint.model import Rule as Rule
from neuron.lint.source import source_line
from neuron.program import Program
from neuron.targets import Target

RULES: tuple[Rule, ...] = (
    *identifiers.ID_RULES,
    *identifiers.RULES,
    *opcodes.RULES,
    *dtypes.RULES,
    *shapes.RULES,
    *collectives.RULES,
    *indices.RULES,
)
"""All rules, in the order in which they are checked."""


def lint(
    program: Program,
    target: Target,
    *,
    lnc: int = 2,
    operators: Iterable[str] | None = None,
    further: Iterable[Rule] = (),
) -> list[Finding]:
    """The rules that a program breaks, errors and warnings.

    A module whose ids are wrong has no operands to look at: then these are the only findings.

    Args:
        lnc: physical cores of a rank.
        operators: opcodes that ``neuronx-cc list-operators`` has printed, where that is known.
        further: rules to check beside those of this package.
    """
    listed = None if operators is None else frozenset(operators)
    context = Context(program, target, lnc, listed)
    if wrong := [_finding(*found) for found in _broken(context, identifiers.ID_RULES)]:
        return wrong
    others = _broken(context, [*RULES[len(identifiers.ID_RULES) :], *further])
    return [_finding(*found, line_of=context.graph) for found in others]


def _broken(context: Context, rules: Iterable[Rule]) -> Iterator[tuple[Rule, Found]]:
    return ((rule, found) for rule in rules for found in rule.find(context))


def _finding(rule: Rule, found: Found, line_of: Graph | None = None) -> Finding:
    instruction, values = found
    if instruction is None:
        return Finding(rule, "", values, None)
    line = source_line(line_of, instruction) if line_of is not None else None
    return Finding(rule, instruction.name, values, line)
