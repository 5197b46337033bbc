"""A tiny GLM over four CPU devices: recall through sparse attention, and drafts of its own layer.

Asks it for facts that lie anywhere in contexts of 16 times the tokens that a query may attend to,
then has it continue stories with drafts and without. The model ships with the project; what it
was trained on is in dcpjax/assets/glm-tiny/README.md.
"""

import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from dcpjax import LLM, SamplingParams
from scripts.tiny_glm.story import story
from scripts.tiny_glm.tasks import single_question

TOP_K = 32
CONTEXT = 16 * TOP_K
QUESTIONS, STORIES, STORY_TOKENS = 32, 8, 64
SEED, ROUNDS = 7, 5
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
SETTINGS: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "decode_context_parallel_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": CONTEXT + STORY_TOKENS,
}


@dataclass(frozen=True)
class Told:
    """What an engine made of the stories, and how fast: the median of the rounds."""

    tokens: list[tuple[int, ...]]
    tokens_per_second: float


def main() -> int:
    console = Console()
    with ExitStack() as opened:
        with console.status("compiling: the model over four devices, without drafts"):
            plain = opened.enter_context(LLM("glm-tiny", **SETTINGS))
        with console.status("compiling: the same with drafts"):
            drafting = opened.enter_context(LLM("glm-tiny", speculative_config=DRAFTS, **SETTINGS))
        num_right, example = ask(plain)
        told, drafted = tell(plain, drafting)
        acceptance_length = cast(float, drafting.stats()["acceptance_length"])
    console.print(f"The end of a context of {CONTEXT} tokens, and the answer:\n{example}\n")
    console.print(table_of(num_right, told, drafted, acceptance_length))
    return 0 if told.tokens == drafted.tokens else 1


def ask(llm: LLM) -> tuple[int, str]:
    """How many questions are answered rightly, and the last words of one of them."""
    asked = [
        single_question(np.random.default_rng((SEED, row)), CONTEXT, is_dialogue=True)
        for row in range(QUESTIONS)
    ]
    prompts = [row.tokens.tolist() for row, _ in asked]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
    found = [answer.outputs[0].token_ids[0] for answer in answers]
    num_right = sum(one == answer for one, (_, answer) in zip(found, asked, strict=True))
    assert llm.tokenizer is not None
    return num_right, llm.tokenizer.decode([*prompts[0][-40:], found[0]])


def tell(*sides: LLM) -> list[Told]:
    """Continue stories, all sides in turn; the first round warms caches up."""
    prompts = [story(np.random.default_rng((SEED, 1, row)), 96) for row in range(STORIES)]
    params = SamplingParams(max_tokens=STORY_TOKENS, temperature=0, ignore_eos=True)

    def continued(llm: LLM) -> tuple[list[tuple[int, ...]], float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return [output.outputs[0].token_ids for output in outputs], time.perf_counter() - start

    rounds = [[continued(llm) for llm in sides] for _ in range(1 + ROUNDS)]
    told = []
    for (tokens, _), *measured in zip(*rounds, strict=True):
        seconds = statistics.median(seconds for _, seconds in measured)
        told.append(Told(tokens, STORIES * STORY_TOKENS / seconds))
    return told


def table_of(num_right: int, plain: Told, drafted: Told, acceptance_length: float) -> Table:
    table = Table("measured", "result", title="glm-tiny, tp 4, dcp 4")
    table.add_row(f"answers that are right, of {QUESTIONS}", str(num_right))
    table.add_row("tokens that a query attends to, of", f"{TOP_K} of {CONTEXT}")
    table.add_row("tokens per verification with 3 drafts", f"{acceptance_length:.2f}")
    table.add_row("tokens/s without drafts", f"{plain.tokens_per_second:.0f}")
    table.add_row("tokens/s with drafts", f"{drafted.tokens_per_second:.0f}")
    same = "the same" if plain.tokens == drafted.tokens else "NOT the same"
    table.add_row("tokens with and without drafts", same)
    return table


if __name__ == "__main__":
    sys.exit(main())
