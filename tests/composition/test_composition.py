"""Every combination of settings gives the tokens of one plain device, or is refused at start.

What one plain device says is what transformers says: 64 greedy tokens of up to 20 prompts, without
near ties. With a bfloat16 pool it is what the plain engine with such a pool says, up to the first
near tie: sums in another order may round a stored value the other way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle

import pytest

from dcpjax.engine.request import Request
from dcpjax.errors import ConfigError
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.composition.pairwise import pairwise_cover
from tests.composition.settings import REFUSED, SERVED, broken_rules, engine_settings, refusal
from tests.engine.pair import Node, ask_prefill, node, transfer
from tests.engine.serving import Served, engine_of, request_of, serve
from tests.golden.records import NUM_TOKENS, Continuation, read_continuations
from tests.golden.tiny import CONFIGS, write_tiny_model

ROUNDING = 0.05
"""Difference of log-probabilities that storing keys and values in bfloat16 may turn around."""

# Eight ranks on few cores are slow; tests/models/test_llama.py has their logits.
QUICK = [c for c in SERVED if c["mesh (tp, cp)"] in ((1, 1), (4, 2), (2, 2), (1, 3))]
COVER = list(zip(cycle(CONFIGS), pairwise_cover(QUICK), strict=False))
ALL = list(zip(cycle(CONFIGS), SERVED, strict=False))


def name_of(value) -> str:
    values = value.values() if isinstance(value, dict) else [value]
    return "-".join(str(part).replace(" ", "") for part in values)


@pytest.fixture(scope="module")
def open_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    @cache
    def open_model(name: str) -> Checkpoint:
        return open_checkpoint(str(write_tiny_model(tmp_path_factory.mktemp(name), name)))

    return open_model


@pytest.fixture(scope="module")
def plain_bfloat16(open_tiny) -> Callable[[str], dict[str, Served]]:
    """What one device with a bfloat16 pool continues, and how sure it is."""

    @cache
    def continuations(name: str) -> dict[str, Served]:
        return run(
            open_tiny(name), read_continuations(f"tiny_{name}"), 2, {"kv_cache_dtype": "bfloat16"}
        )

    return continuations


@contextmanager
def prefill_for(checkpoint: Checkpoint, settings: dict) -> Iterator[Node | None]:
    """One plain device that computes the prompts for an engine that loads them."""
    if "kv_transfer_config" not in settings:
        yield None
        return
    same = {name: settings[name] for name in ("block_size", "kv_cache_dtype")}
    with node(checkpoint, num_pages=1000, **same, **transfer("kv_producer")) as prefill:
        yield prefill


def requests_of(prefill: Node | None, prompts: list[Continuation], **params) -> list[Request]:
    requests = [request_of(item.name, item.prompt, **params) for item in prompts]
    if prefill is not None:
        for request in requests:
            request.kv_transfer_params = ask_prefill(prefill, request.prompt_token_ids)
    return requests


def run(
    checkpoint: Checkpoint, prompts: list[Continuation], logprobs: int | None, settings: dict
) -> dict[str, Served]:
    """Continue the prompts, short and long ones side by side, then the longest again."""
    engine = engine_of(checkpoint, **settings)
    order = [item for pair in zip(prompts, reversed(prompts), strict=True) for item in pair]
    order = list(dict.fromkeys(order))
    params = {"max_tokens": NUM_TOKENS, "logprobs": logprobs}
    with prefill_for(checkpoint, settings) as prefill:
        served = serve(engine, requests_of(prefill, order, **params))
        longest = prompts[-1]
        for _ in range(2):  # others may have evicted it; the second time it is there
            again = serve(engine, requests_of(prefill, [longest], **params))[longest.name]
            assert again.tokens == served[longest.name].tokens
        page = engine.config.virtual_page_size
        cached = (len(longest.prompt) - 1) // page * page * engine.config.enable_prefix_caching
        assert again.num_cached_tokens == cached
        engine.close()
    return served


def assert_same(tokens: list[int], plain: Served) -> None:
    """Equal, or different where the plain engine was not sure."""
    assert len(tokens) == len(plain.tokens)
    for token, expected, details in zip(tokens, plain.tokens, plain.logprobs, strict=True):
        if token != expected:
            best, second = (logprob for _, logprob in details.top)
            assert best - second < ROUNDING
            return


def check(model: str, choice, open_tiny, plain_bfloat16, prompts: list[Continuation]) -> None:
    served = run(open_tiny(model), prompts, None, engine_settings(choice))
    if choice["kv_cache_dtype"] == "float32":
        assert {item.name: served[item.name].tokens for item in prompts} == {
            item.name: list(item.tokens) for item in prompts
        }
    else:
        plain = plain_bfloat16(model)
        for name, found in served.items():
            assert_same(found.tokens, plain[name])


@pytest.mark.parametrize("model, choice", COVER, ids=name_of)
def test_tokens_are_those_of_one_plain_device(model, choice, open_tiny, plain_bfloat16):
    prompts = read_continuations(f"tiny_{model}")
    check(model, choice, open_tiny, plain_bfloat16, prompts[1::3])  # 2 to 150 tokens


@pytest.mark.matrix
@pytest.mark.parametrize("model, choice", ALL, ids=name_of)
def test_all_tokens_are_those_of_one_plain_device(model, choice, open_tiny, plain_bfloat16):
    check(model, choice, open_tiny, plain_bfloat16, read_continuations(f"tiny_{model}"))


def test_what_is_not_refused_starts():
    assert {refusal(choice) for choice in SERVED} == {None}
    assert len(SERVED) > 500


def test_refusals_name_both_settings():
    assert REFUSED
    for choice in REFUSED:
        error = refusal(choice)
        assert isinstance(error, ConfigError)
        assert any(all(name in str(error) for name in names) for names in broken_rules(choice))


def test_another_model_gives_other_tokens(open_tiny):
    """The comparison can fail."""
    prompts = read_continuations("tiny_mha")[:4]
    served = run(open_tiny("gqa"), prompts, None, {})
    assert all(served[item.name].tokens != list(item.tokens) for item in prompts)
