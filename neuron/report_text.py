"""A report as text, for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from neuron.estimate import MAX_INSTRUCTIONS
from neuron.lint import Finding
from neuron.lint.traffic import Collective
from neuron.report import ProgramReport

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN_GROUPS, _SHOWN_RANKS = 2, 8
_SAME_RULE = 5
"""Findings of one rule that are listed; the others are counted."""


def show_report(report: ProgramReport, console: Console) -> None:
    """Print everything about one program."""
    title = f"{report.name} ({report.kind}, {report.num_ranks} ranks, {_machine(report)})"
    console.print(Text(title, style="bold"))
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(report):
        table.add_row(Text(f"  {name}", style="dim"), Text(value))
    console.print(table)
    show_findings(report.findings, console)
    count = len(report.errors)
    passes = "breaks no rule" if not count else f"breaks rules at {count} places"
    console.print(Text(f"  {passes}\n", style="red" if count else "green"))


def _machine(report: ProgramReport) -> str:
    return f"{report.target}, LNC {report.lnc}"


def _rows(report: ProgramReport) -> Iterator[tuple[str, str]]:
    found = report.estimate
    yield "opcodes", _counts(report.opcodes)
    yield "types", _counts(report.dtypes)
    for one in report.collectives:
        yield one.kind, _collective(one)
    if report.collectives:
        yield "sets of groups", str(report.num_group_sets)
    yield "parameters", f"{report.num_parameters}, {size_text(found.parameter_bytes)}"
    yield "updated in place", f"{report.aliases.count}, {size_text(report.aliases.num_bytes)}"
    yield "instructions", f"about {found.instructions:,} of {MAX_INSTRUCTIONS:,}"
    yield (
        "memory of a core",
        f"{size_text(found.hbm_bytes)} of {size_text(report.hbm_limit)}: inputs "
        f"{size_text(found.parameter_bytes)}, outputs {size_text(found.output_bytes)}, at most "
        f"{size_text(found.temporary_bytes)} between",
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _collective(one: Collective) -> str:
    text = f"{one.count} times, {size_text(one.num_bytes)}"
    if not one.groups:
        return text
    groups = [f"{{{_some(group, _SHOWN_RANKS)}}}" for group in one.groups]
    return f"{text}, {len(groups)} groups of {one.group_size}: {_some(groups, _SHOWN_GROUPS)}"


def _some(items: Sequence[object], count: int) -> str:
    """The first items, with a sign that there are more."""
    more = ("...",) if len(items) > count else ()
    return " ".join(map(str, (*items[:count], *more)))


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit of which they are at least one."""
    power = max((num_bytes.bit_length() - 1) // 10, 0)
    unit = _UNITS[min(power, len(_UNITS) - 1)]
    return f"{num_bytes} B" if not power else f"{num_bytes / 1024 ** _UNITS.index(unit):.2f} {unit}"


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print what is broken, rule by rule."""
    by_rule: dict[str, list[Finding]] = {}
    for finding in findings:
        by_rule.setdefault(finding.rule.name, []).append(finding)
    for found in by_rule.values():
        _show_rule(found, console)


def _show_rule(findings: list[Finding], console: Console) -> None:
    rule = findings[0].rule
    style = "red" if rule.severity == "error" else "yellow"
    head = f"  {rule.severity}: {rule.name}: {rule.sentence} [{rule.prevents}; {rule.source}]"
    console.print(Text(head, style=style))
    for finding in findings[:_SAME_RULE]:
        values = ", ".join(f"{name}={value}" for name, value in finding.values.items())
        where = finding.line or "the module"
        named = f" {finding.instruction}" if finding.instruction else ""
        console.print(Text(f"    {where}:{named} {values}"))
    if len(findings) > _SAME_RULE:
        console.print(Text(f"    and {len(findings) - _SAME_RULE} more"))
