"""Write what transformers computes into tests/golden/, for machines without torch.

    python -m scripts.make_golden [tiny] [glm] [smollm2]

Needs torch and transformers. The tests check that the files are what transformers says, where it is
installed.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dcpjax.models.catalog import bring_model
from dcpjax.text import load_tokenizer
from tests.golden import live
from tests.golden.prompts import texts
from tests.golden.records import (
    NEAR_TIE,
    NUM_TOKENS,
    Continuation,
    Logits,
    write_record,
    write_scored,
)
from tests.golden.tiny import (
    CONFIGS,
    PROMPT_LENGTHS,
    SCORED_LENGTH,
    random_tokens,
    write_tiny_model,
)
from tests.golden.tiny_glm import GLM_CONFIGS, scored_tokens, write_tiny_glm

NUM_PROMPTS = 20
NUM_TOP, NUM_RANDOM = 32, 96
"""Logits recorded per position of SmolLM2: the highest ones, and others at random."""


def make_tiny() -> None:
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            model = live.load(write_tiny_model(Path(folder), name))
        continuations = [_without_near_tie(model, name, length) for length in PROMPT_LENGTHS]
        tokens = random_tokens(f"{name} scored", SCORED_LENGTH)
        values = live.logits_of(model, tokens)
        ids = np.tile(np.arange(values.shape[1], dtype=np.int32), (SCORED_LENGTH, 1))
        logits = Logits(np.asarray(tokens, np.int32), np.arange(SCORED_LENGTH), ids, values)
        write_record(f"tiny_{name}", continuations, {"scored": logits})
        print(name, "least margin", min(item.margin for item in continuations), flush=True)


def _without_near_tie(model: live.transformers.PreTrainedModel, name: str, length: int):
    for attempt in range(100):
        prompt = random_tokens(f"{name} {length} {attempt}", length)
        found = live.continue_prompt(model, f"{length} tokens", prompt, NUM_TOKENS)
        if found.margin > NEAR_TIE:
            return found
    raise SystemExit(f"{name}: every prompt of {length} tokens leads to a near tie")


def make_glm() -> None:
    for name in GLM_CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            model = live.load(write_tiny_glm(Path(folder), name))
        write_scored(f"glm_{name}", live.score(model, scored_tokens(name)))


def make_smollm2() -> None:
    path = bring_model("smollm2-135m")
    model, tokenizer = live.load(path), load_tokenizer(path)
    found = []
    for name, text in texts().items():
        item = live.continue_prompt(model, name, tokenizer.encode(text), NUM_TOKENS)
        print(name, len(item.prompt), "tokens, margin", item.margin, flush=True)
        found.append(item)
    usable = [item for item in found if item.margin > NEAR_TIE]
    chosen = usable[: NUM_PROMPTS - 3] + usable[-3:]
    logits = {item.name: _some_logits(model, item) for item in chosen[:-1]}
    write_record("smollm2", chosen, logits)


def _some_logits(model: live.transformers.PreTrainedModel, item: Continuation) -> Logits:
    """At the last token of the prompt and at the last one of all."""
    tokens = [*item.prompt, *item.tokens]
    positions = np.asarray([len(item.prompt) - 1, len(tokens) - 1])
    rows = live.logits_of(model, tokens, last=NUM_TOKENS + 1)[[0, -1]]
    ids = np.stack(list(_some_ids(rows)))
    values = np.take_along_axis(rows, ids, axis=1)
    return Logits(np.asarray(tokens, np.int32), positions, ids.astype(np.int32), values)


def _some_ids(rows: np.ndarray) -> Iterator[np.ndarray]:
    for index, row in enumerate(rows):
        others = np.random.RandomState(index).randint(0, row.size, NUM_RANDOM)
        yield np.concatenate([np.argsort(row)[-NUM_TOP:], others])


def main(names: list[str]) -> None:
    makers = {"tiny": make_tiny, "glm": make_glm, "smollm2": make_smollm2}
    for name in names or makers:
        makers[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
