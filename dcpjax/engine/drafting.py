"""Who proposes tokens, as the scheduler knows it; and drafts from a sequence itself. Host only."""

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from dcpjax.config import SpeculativeConfig
from dcpjax.engine.request import NO_DRAFTS, Drafts, Request
from dcpjax.speculation import AcceptanceCounts, NgramIndex


class Drafter(Protocol):
    """Proposes the tokens that a step verifies.

    One that computes on the devices is also a :class:`dcpjax.engine.device_drafting.DeviceDrafter`.
    """

    def propose(self, request: Request, at_most: int) -> Drafts:
        """Up to ``at_most`` tokens, at least 1, behind all tokens of a request, which are known.

        Called once for each verification, before its step is planned. What a drafter keeps of a
        request stays valid through preemption.
        """
        ...


class Drafting:
    """The drafts of a scheduler's requests, and in ``counts`` what became of them."""

    def __init__(self, drafter: Drafter | None, max_drafts: int) -> None:
        """``max_drafts`` fit into a decode segment."""
        self._drafter, self._max_drafts = drafter, max_drafts
        self.counts = AcceptanceCounts(max_drafts)

    @property
    def is_on(self) -> bool:
        return self._drafter is not None

    def propose(self, running: Iterable[Request]) -> None:
        """Have drafts for all requests whose last token is computed next."""
        for request in running:
            if request.can_continue and request.num_uncomputed == 1:
                request.drafts = self._drafts_of(request)

    def forget(self, running: Iterable[Request]) -> None:
        """Go on without drafts."""
        for request in running:
            request.drafts = NO_DRAFTS

    def _drafts_of(self, request: Request) -> Drafts:
        """As many as fit into a step, and into the sequence with one more token behind them.

        None where penalties count the tokens before: each draft would have to be counted for the
        next ones, and not if it is rejected.
        """
        room = request.max_length - request.num_tokens - 1
        at_most = min(self._max_drafts, room)
        if self._drafter is None or at_most < 1 or request.params.has_penalties:
            return NO_DRAFTS
        return self._drafter.propose(request, at_most)


class NgramDrafter:
    """What followed where the last tokens were seen before, see :class:`NgramIndex`.

    With synthetic acceptance the length is what counts: where nothing was found, the last token is
    proposed again and again.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, at_most: int) -> Drafts:
        """See :class:`Drafter`."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = self._index(request)
        tokens = index.propose(request.output_token_ids, at_most)
        if not tokens and self._config.rejection_sample_method == "synthetic":
            last = request.num_tokens - 1
            tokens = tuple(request.tokens(last, last + 1) * at_most)
        return Drafts(len(tokens), tokens) if tokens else NO_DRAFTS

    def _index(self, request: Request) -> NgramIndex:
        return NgramIndex(
            request.prompt_token_ids,
            shortest=self._config.shortest_lookup,
            longest=self._config.longest_lookup,
        )
