"""SmolLM2-135M through two engines of any shapes: token for token what transformers says."""

from typing import Any

import pytest

from dcpjax.models.catalog import bring_model
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.composition.pairwise import Choice, all_choices
from tests.engine.pair import ask_prefill, decode_request, node, skip_without, transfer
from tests.golden.records import NUM_TOKENS, read_continuations

PREFILL: dict[str, dict[str, Any]] = {
    "tp 1": {},
    "tp 3": {"tensor_parallel_size": 3},
    "dcp prefill 3": {
        "tensor_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "prefill_gather": "q",
        "apply_prefill_dcp": True,
    },
}
DECODE: dict[str, dict[str, Any]] = {
    "one device": {},
    "dcp 3": {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
    "tp 3": {"tensor_parallel_size": 3},
    "(3, 3)": {"tensor_parallel_size": 9, "decode_context_parallel_size": 3},
}
OPTIONS = {
    "prefill": tuple(PREFILL),
    "decode": tuple(DECODE),
    "page": ((16, 16), (64, 64), (16, 64)),
    "interleave": (16, "page"),
    "connector": ("NixlConnector", "MooncakeConnector", "InProcessConnector"),
}
ALL = all_choices(OPTIONS, lambda choice: True)
QUICK = {
    "prefill": "dcp prefill 3",
    "decode": "dcp 3",
    "page": (16, 16),
    "interleave": "page",
    "connector": "NixlConnector",
}


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint(str(bring_model("smollm2-135m")))


def settings_of(shape: dict[str, Any], page: int, interleave: int | str) -> dict[str, Any]:
    dcp = shape.get("decode_context_parallel_size", 1)
    stripe = page if interleave == "page" else interleave
    return {
        **shape,
        "block_size": page,
        "cp_kv_cache_interleave_size": stripe,
        "max_num_batched_tokens": max(64, dcp * stripe),
        "max_num_seqs": 1,
        "max_model_len": 1024,
    }


def check_pair(
    checkpoint: Checkpoint, choice: Choice, num_prompts: int, num_tokens: int = NUM_TOKENS
) -> None:
    """The shortest prompt and some long ones, each twice: the second time the decode engine has its
    beginning already."""
    skip_without(choice["connector"])
    recorded = sorted(read_continuations("smollm2"), key=lambda item: len(item.prompt))
    fitting = [item for item in recorded if len(item.prompt) < 900]
    chosen = [fitting[0], *fitting[-num_prompts:]]
    shapes = PREFILL[choice["prefill"]], DECODE[choice["decode"]]
    (prefill_page, decode_page), connector = choice["page"], choice["connector"]
    producer = settings_of(shapes[0], prefill_page, choice["interleave"])
    consumer = settings_of(shapes[1], decode_page, choice["interleave"])
    with (
        node(checkpoint, **producer, **transfer("kv_producer", connector)) as prefill,
        node(checkpoint, **consumer, **transfer("kv_consumer", connector)) as decode,
    ):
        for item in [*chosen, *chosen]:
            request = decode_request(
                item.prompt, ask_prefill(prefill, item.prompt), max_tokens=num_tokens
            )
            decode.engine.add(request)
            decode.run(request.request_id)
            assert decode.served[request.request_id].tokens == list(item.tokens[:num_tokens])
        assert not decode.engine.stats()["kv_transfer"]["num_failed"]
        assert decode.engine.stats()["prefix_cache_hits"] > 0
        prefill.drain()
        decode.drain()


def test_a_pair_continues_as_one_engine(smollm2):
    check_pair(smollm2, QUICK, 1, num_tokens=12)


@pytest.mark.matrix
@pytest.mark.parametrize("choice", ALL, ids=lambda choice: "-".join(map(str, choice.values())))
def test_every_pair_continues_as_one_engine(choice, smollm2):
    check_pair(smollm2, choice, 3)
