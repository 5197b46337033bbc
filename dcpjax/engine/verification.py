"""What a step has sampled, as the tokens that count. On the host, when the step has ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.config import SpeculativeConfig
from dcpjax.engine.plan import Segment
from dcpjax.engine.request import Request
from dcpjax.speculation import emitted, num_accepted, num_accepted_synthetically

SeedWords = Callable[[Request], np.ndarray]


@dataclass(frozen=True)
class Verifier:
    """Accepts drafts; ``seed_words`` are those that the sampler has for a request."""

    config: SpeculativeConfig
    seed_words: SeedWords

    def accept(
        self,
        segments: Sequence[Segment],
        sampled: Sequence[Sequence[int]],
        device_drafts: Mapping[str, np.ndarray],
    ) -> list[list[int]]:
        """The new tokens of each segment: accepted drafts and one more.

        Args:
            sampled: what was chosen behind each segment's last token and behind each draft.
            device_drafts: by request id, those that the host did not know.
        """
        if not segments:
            return []
        num_drafts = np.asarray([segment.drafts.count for segment in segments], np.int32)
        drafts = np.zeros((len(segments), self.config.num_speculative_tokens), np.int32)
        chosen = np.zeros((len(segments), self.config.width), np.int32)
        for row, (segment, tokens) in enumerate(zip(segments, sampled, strict=True)):
            drafts[row, : num_drafts[row]] = _draft_ids(segment, device_drafts)
            chosen[row, : len(tokens)] = tokens
        accepted = self._count(segments, drafts, chosen, num_drafts)
        tokens = emitted(drafts, chosen, accepted).tolist()
        return [row[: 1 + count] for row, count in zip(tokens, accepted, strict=True)]

    def _count(
        self,
        segments: Sequence[Segment],
        drafts: np.ndarray,
        chosen: np.ndarray,
        num_drafts: np.ndarray,
    ) -> np.ndarray:
        length = self.config.synthetic_acceptance_length
        if length is None:
            return num_accepted(drafts, chosen, num_drafts)
        requests = [segment.request for segment in segments]
        seeds = np.stack([self.seed_words(request) for request in requests])
        counters = np.asarray([request.next_output_index for request in requests], np.int32)
        return num_accepted_synthetically(seeds, counters, num_drafts, length)


def _draft_ids(segment: Segment, device_drafts: Mapping[str, np.ndarray]) -> Sequence[int]:
    known = segment.drafts.token_ids
    if known is not None:
        return known
    return device_drafts[segment.request.request_id][: segment.drafts.count].tolist()
