"""Steps on their way: dispatched, and not waited for."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from dcpjax.engine.plan import StepPlan
from dcpjax.engine.request import Request, TokenLogprobs
from dcpjax.engine.sampler import SampledTokens, witness_of
from dcpjax.engine.verification import Verifier
from dcpjax.sampling import SampleResult


@dataclass(frozen=True)
class Disagreement:
    """Ranks have different tokens before a prompt chunk of a request.

    Attributes:
        num_agreed: the first tokens that all of them have.
        text: what each has.
    """

    request: Request
    num_agreed: int
    text: str


@dataclass(frozen=True)
class Dispatched:
    """A step on its way: its plan, and its tokens once somebody waits for them.

    ``ends`` is an output of the step itself, on every device, ``drafted`` of what was dispatched
    behind it to draft, if anything was. With a ``verifier`` the step had drafts, those that the
    host does not know in ``drafts`` by request id.
    """

    plan: StepPlan
    tokens: SampledTokens
    ends: Array
    drafted: Array | None = None
    verifier: Verifier | None = None
    drafts: Callable[[], dict[str, np.ndarray]] = dict
    prefixes: Array | None = None

    def wait(self) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """The new tokens of each sampling segment, and log-probabilities where asked for, when the
        step writes into no page any more; what drafts behind it may still write into pages of the
        draft layer.

        A device may be the last to write: the tokens, read from one of them, do not tell.
        """
        jax.block_until_ready(self.ends)
        sampled, logprobs = self.tokens.wait()
        if self.verifier is None:
            return sampled, logprobs
        tokens = self.verifier.accept(self.plan.sampling, sampled, self.drafts())
        counts = map(len, tokens)
        return tokens, [items[:n] for items, n in zip(logprobs, counts, strict=True)]

    def disagreements(self) -> list[Disagreement]:
        """When the step has ended. Its results for these requests are of no meaning."""
        if self.prefixes is None:
            return []
        by_segment = np.asarray(self.prefixes).swapaxes(0, 1)
        return [
            _disagreement(segment.request, every)
            for segment, every in zip(self.plan.prefill, by_segment, strict=False)
            if (every != every[:1]).any()
        ]


def _disagreement(request: Request, prefixes: np.ndarray) -> Disagreement:
    """``prefixes`` [ranks, 2] as ``StepResult`` has them.

    Digests are of all tokens: where as many differ, nobody knows from where on.
    """
    counts = prefixes[:, 0]
    num_agreed = 0 if (counts == counts[0]).all() else int(counts.min())
    every = ", ".join(f"{count} tokens of digest {digest:08x}" for count, digest in prefixes)
    text = f"the ranks that split the layers have different tokens before a chunk: {every}"
    return Disagreement(request, num_agreed, text)


@dataclass(frozen=True)
class Executed:
    """A step on its way, without requests: what was chosen, and the fields of Dispatched."""

    outputs: tuple[int, ...]
    ids: Array
    details: SampleResult | None
    ends: Array
    drafted: Array | None
    prefixes: Array | None

    def witness(self) -> int:
        """Wait until the step has ended on every device of this process; what it has chosen."""
        jax.block_until_ready(self.ends)
        return witness_of(self.ids, self.outputs)
