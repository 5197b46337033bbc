"""What there is to know about a lowered program before anything compiles it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from neuron.errors import RuleError
from neuron.estimate import LIMITS, Estimate, estimate
from neuron.lint import Finding, lint
from neuron.lint.graph import Graph, leaves, num_bytes, type_name
from neuron.lint.identifiers import ID_RULES
from neuron.lint.traffic import Collective, find_collectives
from neuron.program import Program
from neuron.targets import Target


@dataclass(frozen=True)
class Aliases:
    """Outputs that share an input's memory."""

    count: int
    num_bytes: int


@dataclass(frozen=True)
class ProgramReport:
    """One program.

    Attributes:
        opcodes, dtypes: how many instructions have each.
        num_parameters, parameter_bytes: of the inputs of one rank.
        hbm_limit: bytes of memory that a core of the target has.
        findings: broken rules and limits.
    """

    name: str
    kind: str
    num_ranks: int
    target: str
    lnc: int
    opcodes: dict[str, int]
    dtypes: dict[str, int]
    collectives: tuple[Collective, ...]
    num_parameters: int
    aliases: Aliases
    estimate: Estimate
    hbm_limit: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        """The findings for which a program is not compiled."""
        return [finding for finding in self.findings if finding.rule.severity == "error"]

    @property
    def num_group_sets(self) -> int:
        """Different sets of groups, for each of which the runtime makes a communicator."""
        return len({frozenset(one.groups) for one in self.collectives if one.groups})

    def to_json(self) -> dict[str, Any]:
        """The report as JSON's types."""
        return {
            "name": self.name,
            "kind": self.kind,
            "num_ranks": self.num_ranks,
            "target": self.target,
            "lnc": self.lnc,
            "passes": not self.errors,
            "opcodes": self.opcodes,
            "dtypes": self.dtypes,
            "collectives": [
                {**asdict(one), "group_size": one.group_size} for one in self.collectives
            ],
            "num_group_sets": self.num_group_sets,
            "num_parameters": self.num_parameters,
            "aliases": asdict(self.aliases),
            "estimate": {**asdict(self.estimate), "hbm_bytes": self.estimate.hbm_bytes},
            "hbm_limit": self.hbm_limit,
            "findings": [_finding_json(finding) for finding in self.findings],
        }


def _finding_json(finding: Finding) -> dict[str, Any]:
    rule = finding.rule
    return {
        "rule": rule.name,
        "severity": rule.severity,
        "sentence": rule.sentence,
        "prevents": rule.prevents,
        "source": rule.source,
        "instruction": finding.instruction,
        "values": {name: _plain(value) for name, value in finding.values.items()},
        "line": finding.line,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | str | bool | list | tuple | None) else str(value)


def find_broken(
    program: Program, target: Target, *, lnc: int = 2, operators: Iterable[str] | None = None
) -> list[Finding]:
    """Every rule and limit that a program breaks.

    Raises:
        RuleError: instructions cannot be told apart or found by their ids.
    """
    findings = lint(program, target, lnc=lnc, operators=operators, further=LIMITS)
    for finding in findings:
        if finding.rule in ID_RULES:
            raise RuleError(finding.rule.sentence, program=program.name, **finding.values)
    return findings


def report(
    program: Program, target: Target, *, lnc: int = 2, operators: Iterable[str] | None = None
) -> ProgramReport:
    """Everything about one program, for one kind of chip.

    Args:
        lnc: physical cores of a rank.
        operators: opcodes of the installed compiler, where they are known.

    Raises:
        RuleError: instructions cannot be told apart or found by their ids.
    """
    findings = find_broken(program, target, lnc=lnc, operators=operators)
    graph = Graph(program.module)
    found = estimate(program)
    return ProgramReport(
        name=program.name,
        kind=program.kind,
        num_ranks=program.num_ranks,
        target=target.name,
        lnc=lnc,
        opcodes=_counted(instruction.opcode for instruction in graph),
        dtypes=_counted(type_name(leaf) for i in graph for leaf in leaves(i.shape)),
        collectives=find_collectives(program),
        num_parameters=len(graph.parameters),
        aliases=_aliases(graph),
        estimate=found,
        hbm_limit=target.hbm_bytes_per_core(lnc),
        findings=tuple(findings),
    )


def _counted(names: Iterable[str]) -> dict[str, int]:
    """How often each name comes, the commonest first."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _aliases(graph: Graph) -> Aliases:
    entries = graph.module.input_output_alias.entries
    known = [e.parameter_number for e in entries if e.parameter_number < len(graph.parameters)]
    return Aliases(len(entries), sum(num_bytes(graph.parameters[n].shape) for n in known))
