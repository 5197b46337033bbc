"""The matrix of settings as a table of the architecture page."""

from itertools import combinations

from tests.composition.settings import OPTIONS, REFUSED, SERVED

BEGIN = "<!-- composition: written by scripts/composition_table.py -->"
END = "<!-- composition: end -->"


def render_table() -> str:
    """A row per value, a column per setting: what the value cannot be combined with, if anything.

    Nothing is said of three settings that are refused together and not in pairs: there are none.
    """
    served = {pair for choice in SERVED for pair in combinations(choice.items(), 2)}
    refused = {pair for choice in REFUSED for pair in combinations(choice.items(), 2)} - served
    lines = ["| setting | value | not together with |", "|---|---|---|"]
    for setting, values in OPTIONS.items():
        for value in values:
            others = [other for pair in refused for other in pair if (setting, value) in pair]
            others = [other for other in others if other != (setting, value)]
            named = ", ".join(f"{name} {_shown(other)}" for name, other in sorted(others, key=str))
            lines.append(f"| {setting} | {_shown(value)} | {named or '–'} |")
    served_count, refused_count = len(SERVED), len(REFUSED)
    counts = f"{served_count} combinations are served, {refused_count} are refused."
    return "\n".join([*lines, "", counts])


def _shown(value: object) -> str:
    return f"`{value}`"


def with_table(page: str) -> str:
    """The page with the table of today between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{render_table()}\n\n{END}{after}"
