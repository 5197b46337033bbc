"""A prompt of a model with several cache parts, computed by one engine, goes on in another."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from dcpjax.engine.request import FinishReason
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.engine.pair import (
    Node,
    hand_over,
    node,
    skip_without,
    transfer,
)
from tests.engine.serving import request_of
from tests.golden.tiny import random_tokens
from tests.models.tiny_glm import GLM, write_model

MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SMALL: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 4,
    "num_pages": 20,
}
ENGINES: dict[str, dict[str, Any]] = {
    "alone": {},
    "sharded": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 2,
        **MTP,
    },
    "whole index": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "index_kv": "replicated",
        **MTP,
    },
}
"""``alone`` has no drafts, the others keep the index in two ways."""
VALUES = GLM | {"num_hidden_layers": 2}
TOKENS = 10
PROMPTS = {
    length: [token % VALUES["vocab_size"] for token in random_tokens(f"latent {length}", length)]
    for length in (1, 2, 9, 16, 17, 41)
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers, one with an indexer that chooses 4 tokens, and a draft layer."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, VALUES)
    return open_checkpoint(str(folder))


@pytest.fixture(scope="module", params=["InProcessConnector", "NixlConnector"])
def nodes(request, glm) -> Iterator[dict[str, Node]]:
    skip_without(request.param)
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(
                node(glm, **SMALL, **settings, **transfer("kv_both", request.param))
            )
            for name, settings in ENGINES.items()
        }


@pytest.fixture(scope="module")
def expected(nodes) -> dict[int, list[int]]:
    """What one engine says that computes everything and has no drafts."""
    alone = nodes["alone"]
    for length, prompt in PROMPTS.items():
        alone.engine.add(request_of(f"{length}", prompt, max_tokens=TOKENS, ignore_eos=True))
        alone.run(f"{length}")
    return {length: alone.served[f"{length}"].tokens for length in PROMPTS}


PAIRS = [
    ("sharded", "whole index"),
    ("whole index", "sharded"),
    ("sharded", "alone"),
    ("whole index", "alone"),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_shape_goes_on_in_any_other(source, target, nodes, expected):
    prefill, decode = nodes[source], nodes[target]
    decode.engine.reset_prefix_cache()
    for length, prompt in [*PROMPTS.items(), (41, PROMPTS[41])]:
        served = hand_over(prefill, decode, prompt, max_tokens=TOKENS, ignore_eos=True)
        assert served.tokens == expected[length], f"{length} tokens"
        assert served.finish_reason is FinishReason.LENGTH
    assert served.num_cached_tokens > 0
    prefill.drain()
    decode.drain()
