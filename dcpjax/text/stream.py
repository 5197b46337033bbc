"""Token ids to text while they arrive: whole characters only, ended by stop strings.

The deltas of a stream add up to the decoding of all its tokens, up to the stop string. Work per
token does not depend on how many came before.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcpjax.text.stop import Match, StopFinder
from dcpjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one push adds.

    ``stopped`` is the stop string that ended the stream, if one did. ``offsets`` has, for each
    pushed token, the position in the stream's whole text of the character it begins or continues.
    """

    text: str
    stopped: str | None = None
    offsets: tuple[int, ...] = ()


class TextStream:
    """Detokenises one sequence.

    Stop strings that end within the first ``min_tokens`` tokens do not count.

    Held back are: a character whose bytes are incomplete, and characters that may turn out to be a
    stop string. ``stopped`` is the stop string found, settled at the latest by :meth:`finish`.
    After that the stream adds no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skips_special_tokens = skip_special_tokens
        self._includes_stop = include_stop
        self._num_unstoppable = min_tokens  # tokens to come that no stop string ends
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips_space = tokenizer.spelling.strips_first_space
        self._finder = StopFinder(stop)
        self._length = 0  # characters decoded
        self._held = ""  # the last of them, not yet handed out
        self._is_finished = False

    @property
    def num_characters(self) -> int:
        """Characters of all tokens so far, those held back included."""
        return self._length

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Add tokens; the text that is certain now."""
        offsets: list[int] = []
        text: list[str] = []
        for token in token_ids:
            offsets.append(self._length)
            data = self._tokenizer.token_bytes(token, self._skips_special_tokens)
            text.append(self._take(self._decoder.decode(data)))
            self._num_unstoppable -= self._num_unstoppable > 0
        return TextDelta("".join(text), self.stopped, tuple(offsets))

    def finish(self) -> str:
        """The rest of the text, given that no token follows. A second call adds nothing."""
        if self._is_finished:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        match = self._finder.finish()
        if not self._is_finished:
            text += self._end_at(match) if match else self._hand_out(self._length)
        self._is_finished = True
        return text

    def _take(self, text: str) -> str:
        """Add decoded characters; those that may be handed out."""
        if self._is_finished:
            return ""
        if self._strips_space and text:
            text = text.removeprefix(" ")
            self._strips_space = False
        self._length += len(text)
        self._held += text
        if self._num_unstoppable:
            self._finder.skip(text)
            return self._hand_out(self._finder.safe_length)
        match = self._finder.push(text)
        return self._end_at(match) if match else self._hand_out(self._finder.safe_length)

    def _hand_out(self, end: int) -> str:
        """The held characters before position ``end`` of the whole text."""
        count = end - (self._length - len(self._held))
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _end_at(self, match: Match) -> str:
        self.stopped = match.stop
        self._is_finished = True
        text = self._hand_out(match.end if self._includes_stop else match.start)
        self._held = ""
        return text
