"""What the trained model can do, on rows that training never saw.

All numbers are of sparse attention, as a server computes it, unless said otherwise.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.tiny_glm import mtp
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.layers import Params
from scripts.tiny_glm.losses import shifted
from scripts.tiny_glm.model import Attending, forward
from scripts.tiny_glm.story import story
from scripts.tiny_glm.tasks import TASKS, VALUE_IDS, single_question

NUM_DRAFTS = 3
CONTEXT_OVER_TOPK = 16
_SEED = 1 << 40
"""Far from the seeds of training batches."""

DENSE, SPARSE = Attending(is_sparse=False), Attending(is_sparse=True)
NOISE = Attending(is_sparse=True, noise=0)


def evaluate(params: Params, config: GlmConfig, rows: int) -> dict[str, Any]:
    """All numbers that the model's README states; ``rows`` is the size of a sample."""
    context = CONTEXT_OVER_TOPK * config.index_topk
    recall = partial(recall_of_a_key, params, config, rows=rows)
    return {
        "rows": rows,
        "recall_context": context,
        "recall": recall(context, SPARSE),
        "recall_in_dialogue": recall(context, SPARSE, is_dialogue=True),
        "recall_dense": recall(context, DENSE),
        "recall_noise": recall(context, NOISE),
        "recall_by_guessing": round(1 / len(VALUE_IDS), 4),
        "recall_twice_the_context": recall(2 * context, SPARSE),
        "accuracy": {name: task_accuracy(params, config, name, context, rows) for name in TASKS},
        "acceptance_length": acceptance_length(params, config, max(1, rows // 4)),
    }


def recall_of_a_key(
    params: Params,
    config: GlmConfig,
    context: int,
    attending: Attending,
    rows: int,
    is_dialogue: bool = False,
) -> float:
    """How often the value of a fact is the most likely token after its key.

    The fact stands anywhere in ``context`` tokens, among other facts and stories; the key comes
    last.
    """
    asked = [
        single_question(np.random.default_rng((_SEED, 1, row)), context, is_dialogue)
        for row in range(rows)
    ]
    chosen = most_likely(params, config, np.stack([row.tokens for row, _ in asked]), attending)
    answers = np.asarray([answer for _, answer in asked])
    return round(float((chosen[:, -1] == answers).mean()), 4)


def task_accuracy(params: Params, config: GlmConfig, task: str, length: int, rows: int) -> float:
    """Share of the tokens that count in full and are the most likely ones."""
    made = [TASKS[task](np.random.default_rng((_SEED, 2, row)), length) for row in range(rows)]
    tokens = np.stack([row.tokens for row in made])
    weights = np.stack([row.weights for row in made])
    counts = weights == weights.max()
    is_right = most_likely(params, config, tokens, SPARSE)[:, :-1] == tokens[:, 1:]
    return round(float(is_right[counts[:, 1:]].mean()), 4)


def most_likely(
    params: Params, config: GlmConfig, tokens: np.ndarray, attending: Attending, at_once: int = 4
) -> np.ndarray:
    """The most likely next token at each place of [B, T]."""

    @jax.jit
    def of_rows(params: Params, tokens: jax.Array) -> jax.Array:
        return forward(params, config, tokens, attending).logits.argmax(axis=-1)

    parts = [tokens[start : start + at_once] for start in range(0, len(tokens), at_once)]
    return np.concatenate([np.asarray(of_rows(params, jnp.asarray(part))) for part in parts])


def acceptance_length(
    params: Params, config: GlmConfig, rows: int, prompt: int = 96, count: int = 64
) -> float:
    """Mean tokens per verification, the target's own token included, of greedy continuations."""
    prompts = [story(np.random.default_rng((_SEED, 3, row)), prompt) for row in range(rows)]
    tokens, drafted = _continue(params, config, np.asarray(prompts), count)
    steps = [
        step
        for row, drafts in zip(tokens, drafted, strict=True)
        for step in accepted_per_step(row, drafts, prompt)
    ]
    return round(1 + float(np.mean(steps)), 4)


def accepted_per_step(tokens: np.ndarray, drafted: np.ndarray, prompt: int) -> list[int]:
    """Drafts accepted in each verification of a greedy continuation.

    Args:
        tokens: prompt and continuation, [T].
        drafted: what row t of the MTP layer drafts for places t + 2, t + 3, ..., [T, drafts].
        prompt: length of the prompt. The first token after it comes without drafts.
    """
    num_drafts = drafted.shape[1]
    accepted, newest = [], prompt
    while newest + num_drafts < len(tokens):
        wanted = tokens[newest + 1 : newest + 1 + num_drafts]
        is_right = drafted[newest - 1] == wanted
        accepted.append(int(np.cumprod(is_right).sum()))
        newest += accepted[-1] + 1
    return accepted


def _continue(
    params: Params, config: GlmConfig, prompts: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with ``count`` greedy tokens, [B, T], and all rows' drafts, [B, T, NUM_DRAFTS]."""
    prompt = prompts.shape[1]

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(place: jax.Array, tokens: jax.Array) -> jax.Array:
            logits = forward(params, config, tokens, SPARSE).logits
            newest = jax.lax.dynamic_index_in_dim(logits, place - 1, axis=1, keepdims=False)
            chosen = newest.argmax(axis=-1).astype(tokens.dtype)
            return jax.lax.dynamic_update_index_in_dim(tokens, chosen, place, axis=1)

        tokens = jax.lax.fori_loop(prompt, prompt + count, step, tokens)
        return tokens, draft_all(params, config, tokens)

    tokens, drafted = run(params, jnp.pad(jnp.asarray(prompts), ((0, 0), (0, count))))
    return np.asarray(tokens), np.asarray(drafted)


def draft_all(params: Params, config: GlmConfig, tokens: jax.Array) -> jax.Array:
    """The drafts of every row, each from those before it, [B, T, NUM_DRAFTS]."""
    hidden = forward(params, config, tokens, SPARSE).hidden
    draft, state, _ = mtp.first_draft(params, config, hidden, shifted(tokens, 1), SPARSE)
    drafted = [draft.logits.argmax(axis=-1)]
    for step in range(1, NUM_DRAFTS):
        draft = mtp.next_draft(params, config, draft, drafted[-1], step, state)
        drafted.append(draft.logits.argmax(axis=-1))
    return jnp.stack(drafted, axis=-1)
