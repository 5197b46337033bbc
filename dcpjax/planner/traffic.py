"""Messages between the ranks of an engine: which collectives a step has, and how large they are.

The collectives are those of our own compiled programs: a test compares the two lists one by one.
Each sum counts by itself, although a compiler may make one message of two that follow each other.
"""

from collections.abc import Iterator
from dataclasses import replace

from dcpjax.cache.widths import value_bytes
from dcpjax.planner.attention_traffic import PARTIAL_BYTES, AttentionTraffic
from dcpjax.planner.collectives import Collective as Collective
from dcpjax.planner.collectives import StepTokens as StepTokens
from dcpjax.planner.collectives import Traffic as Traffic
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.models import ModelShape

PREFIX_BYTES = 8
"""Of what a rank says about the tokens before a chunk: their number, and a digest."""


def traffic(
    model: ModelShape,
    deployment: Deployment,
    tokens: int,
    *,
    context: int = 0,
    is_prefill: bool = False,
    dtype: str = "bfloat16",
) -> Traffic:
    """The collectives of one step of ``tokens`` tokens on one copy of the attention.

    Args:
        tokens: one of each sequence that is generated, or those of a chunk of a prompt.
        context: tokens of a sequence before them.
        dtype: of activations.
    """
    step = StepTokens(decode_rows=tokens, context=context)
    if is_prefill:
        step = StepTokens(prompt_rows=1, prompt_width=tokens, context=context + tokens)
    return step_traffic(model, deployment, step, dtype=dtype)


def step_traffic(
    model: ModelShape, deployment: Deployment, step: StepTokens, *, dtype: str = "bfloat16"
) -> Traffic:
    """The collectives of one step, without what drafts for the next one.

    Raises:
        UnsupportedCombination: a deployment that the model's attention does not have.
    """
    item = value_bytes(dtype)
    return Traffic.of(
        (
            *_prefixes(deployment, step),
            *AttentionTraffic(model, deployment, item).of(step),
            *_hidden_sums(model, deployment, step, item),
            *_expert_exchanges(model, deployment, step, item),
            *_outputs(model, deployment, step, item),
        )
    )


def draft_traffic(
    model: ModelShape, deployment: Deployment, step: StepTokens, *, dtype: str = "bfloat16"
) -> Traffic:
    """The collectives of what drafts behind a step: its layer has all tokens on every rank.

    The first draft goes over all tokens of the step, each further one over one token a sequence.
    """
    further = deployment.draft_tokens - 1
    if further < 0:
        return Traffic(())
    item, sizes = value_bytes(dtype), ((step.decode + step.prompt, 1), (step.rows, further))
    return Traffic.of(
        replace(one, count=count)
        for tokens, count in sizes
        for one in _draft(model, deployment, tokens, step.rows, item)
    )


def _prefixes(deployment: Deployment, step: StepTokens) -> Iterator[Collective]:
    """Ranks that send layers to each other compare what they have before each chunk."""
    if deployment.prefill_kv == "layer_split":
        ranks = deployment.tp * deployment.pcp
        num_bytes = ranks * step.prompt_rows * PREFIX_BYTES
        yield Collective("all-gather", "prefixes", ranks, num_bytes, 1)


def _hidden_sums(
    model: ModelShape, deployment: Deployment, step: StepTokens, item: int
) -> Iterator[Collective]:
    """Sums of hidden states after embedding and feed-forward."""
    tokens = step.decode + step.prompt // deployment.pcp
    hidden, ranks = tokens * model.hidden_size * item, deployment.tp
    yield Collective("all-reduce", "embedding", ranks, hidden, 1)
    yield Collective("all-reduce", "feed-forward outputs", ranks, hidden, model.num_layers)


def _expert_exchanges(
    model: ModelShape, deployment: Deployment, step: StepTokens, item: int
) -> Iterator[Collective]:
    """PCP ranks have different experts: prompt tokens travel to all ranks, and their sums back.

    With experts over the ranks of several copies, other things travel: see
    :mod:`dcpjax.planner.steps`.
    """
    if model.experts is None:
        return
    ranks, layers = deployment.pcp, model.experts.layers
    prompt, decode = (tokens * model.hidden_size for tokens in (step.prompt, step.decode))
    yield Collective("all-gather", "inputs of experts", ranks, prompt * item, layers)
    yield Collective("all-gather", "which inputs are padding", ranks, step.prompt, min(1, layers))
    yield Collective("reduce-scatter", "outputs of experts", ranks, prompt * PARTIAL_BYTES, layers)
    yield Collective("all-reduce", "outputs of experts", ranks, decode * PARTIAL_BYTES, layers)


def _outputs(
    model: ModelShape, deployment: Deployment, step: StepTokens, item: int
) -> Iterator[Collective]:
    """The states of last tokens, the choice of tokens, and the states that a draft layer needs."""
    state = model.hidden_size * item
    yield Collective("all-reduce", "last tokens", deployment.pcp, step.prompt_rows * state, 1)
    yield _choice(deployment, step.outputs)
    if deployment.draft_tokens:
        yield Collective(
            "all-gather", "states to draft from", deployment.pcp, step.prompt * state, 1
        )


def _choice(deployment: Deployment, rows: int) -> Collective:
    """The most likely token of each rank's share of the vocabulary, and its logit."""
    ranks = deployment.tp
    num_bytes = 2 * ranks * rows * PARTIAL_BYTES
    return Collective("all-gather", "most likely tokens", ranks, num_bytes, 1)


def _draft(
    model: ModelShape, deployment: Deployment, tokens: int, rows: int, item: int
) -> Iterator[Collective]:
    """One draft: its layer over ``tokens`` tokens, the choice for ``rows`` of them."""
    values, ranks = tokens * model.hidden_size, deployment.tp
    for purpose in ("embedding", "attention outputs", "feed-forward outputs"):
        yield Collective("all-reduce", f"draft: {purpose}", ranks, values * item, 1)
    if model.experts is not None:
        sums = values * PARTIAL_BYTES
        yield Collective("all-reduce", "draft: outputs of experts", deployment.pcp, sums, 1)
    yield _choice(deployment, rows)
