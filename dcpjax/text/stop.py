"""Find the first stop string in a text that arrives piece by piece.

First means: the earliest beginning; of several that begin there, the longest. So the result does
not depend on how the text was cut, and a match is settled only when none can still go before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Match:
    """``stop`` begins at the character ``start`` of the whole text."""

    start: int
    stop: str

    @property
    def end(self) -> int:
        return self.start + len(self.stop)

    def goes_before(self, start: int, length: int) -> bool:
        """Whether this match wins against one of ``length`` characters at ``start``."""
        return (self.start, -len(self.stop)) <= (start, -length)


@dataclass
class _Pattern:
    """One stop string and how many of its characters the text ends with (Knuth-Morris-Pratt).

    ``borders[k]`` is the longest proper prefix of ``stop[:k]`` that is its suffix as well. It is
    extended only as far as the text got: a long stop string that never begins costs nothing.
    """

    stop: str
    matched: int = 0
    borders: list[int] = field(default_factory=lambda: [0, 0])

    def push(self, character: str) -> bool:
        """Take one more character; whether the text now ends with the stop string."""
        if self.matched == len(self.stop):
            self.matched = self.borders[self.matched]
        while self.matched and self.stop[self.matched] != character:
            self.matched = self.borders[self.matched]
        if self.stop[self.matched] == character:
            self.matched += 1
            self._extend_borders()
        return self.matched == len(self.stop)

    def _extend_borders(self) -> None:
        if len(self.borders) > self.matched:
            return
        last = self.stop[self.matched - 1]
        border = self.borders[self.matched - 1]
        while border and self.stop[border] != last:
            border = self.borders[border]
        self.borders.append(border + (self.stop[border] == last))


class StopFinder:
    """Reads a text and knows the first stop string in it. Amortised cost: characters × stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._position = 0
        self._best: Match | None = None

    def push(self, text: str) -> Match | None:
        """Read ``text``; the match once it is settled. After that nothing more may be pushed."""
        for character in text:
            self._position += 1
            for pattern in self._patterns:
                if pattern.push(character):
                    self._consider(pattern)
            if self._best and not any(map(self._may_win, self._patterns)):
                return self._best
        return None

    def skip(self, text: str) -> None:
        """Read ``text`` without stopping at what ends in it; it may still begin a stop string."""
        for character in text:
            self._position += 1
            for pattern in self._patterns:
                pattern.push(character)

    def finish(self) -> Match | None:
        """The match in the text so far, given that nothing follows."""
        return self._best

    @property
    def safe_length(self) -> int:
        """Characters of the text that no stop string can take away any more."""
        length = self._position - max((p.matched for p in self._patterns), default=0)
        return min(length, self._best.start) if self._best else length

    def _consider(self, pattern: _Pattern) -> None:
        start = self._position - len(pattern.stop)
        if self._best is None or not self._best.goes_before(start, len(pattern.stop)):
            self._best = Match(start, pattern.stop)

    def _may_win(self, pattern: _Pattern) -> bool:
        """Whether the pattern's unfinished match would go before the best one."""
        is_open = 0 < pattern.matched < len(pattern.stop)
        start = self._position - pattern.matched
        return (
            is_open
            and self._best is not None
            and not self._best.goes_before(start, len(pattern.stop))
        )
