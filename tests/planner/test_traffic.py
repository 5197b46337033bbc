"""Messages of a step: arithmetic of the sources, and laws. Those of compiled programs are compared
with them in ``test_compiled_traffic.py``."""

from dataclasses import replace

import pytest

from dcpjax.errors import UnsupportedCombination
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.models import find_model
from dcpjax.planner.traffic import StepTokens, draft_traffic, step_traffic, traffic

GLM = find_model("glm-5.2")


ACTIVATION = 2
"""Bytes of a value, bfloat16."""


def test_a_decode_step_has_three_collectives_a_layer_or_two():
    """Around the attention; and layers with an indexer one more, of candidates."""
    for exchange, count in (("ag_rs", 3), ("a2a", 2)):
        deployment = Deployment(tp=8, dcp=8, exchange=exchange)
        found = traffic(GLM, deployment, 1, context=100_000).collectives
        attention = [c for c in found if c.kind != "all-reduce" and c.count > 1]
        assert [c.count for c in attention] == [78] * count + [21]
        assert attention[-1].purpose == "candidates"


def test_decode_moves_no_kv():
    """Bytes do not depend on the context; one source counts the whole cache as moved."""
    deployment = Deployment(tp=8, dcp=8)
    assert traffic(GLM, deployment, 1, context=10**5) == traffic(GLM, deployment, 1, context=10**6)
    dense = find_model("deepseek-v3")
    assert traffic(dense, deployment, 1) == traffic(dense, deployment, 1, context=10**6)


def test_candidates_are_exchanged_where_there_are_more_than_are_chosen():
    deployment = Deployment(tp=8, dcp=8)

    def candidates(context: int, deployment: Deployment = deployment) -> list[int]:
        found = traffic(GLM, deployment, 1, context=context).collectives
        return [c.num_bytes for c in found if c.purpose == "candidates"]

    assert candidates(2048) == []
    assert candidates(2056) == [2 * 4 * 2056]
    assert candidates(10**6) == [2 * 4 * 8 * 2048]
    assert candidates(10**6, replace(deployment, index_kv="replicated")) == []


def test_prefill_with_a_shared_cache_gathers_the_context():
    """Facts C3: at 64K tokens 43 MB a layer."""
    deployment = Deployment(pcp=8, dcp=8, prefill_kv="sharded")
    found = traffic(GLM, deployment, 2048, context=65536 - 2048, is_prefill=True)
    latent = next(c for c in found.collectives if c.purpose == "copy: latent")
    assert round(latent.num_bytes / 1e6) == 43 and latent.count == 78
    replicated = replace(deployment, dcp=1, prefill_kv="replicated")
    new = traffic(GLM, replicated, 2048, context=65536 - 2048, is_prefill=True)
    copies = {c.purpose for c in found.collectives} - {c.purpose for c in new.collectives}
    assert copies == {"copy: latent", "copy: indexer"}


def test_new_rows_travel_before_they_are_rounded():
    """As activations, whatever the cache stores: 576 and 128 values a token and layer."""
    deployment = Deployment(pcp=8)
    found = traffic(GLM, deployment, 2048, is_prefill=True).collectives
    rows = {c.purpose: c.num_bytes for c in found if c.purpose.startswith("new rows")}
    assert rows == {
        "new rows: latent": 2048 * 576 * ACTIVATION,
        "new rows: indexer": 2048 * 128 * ACTIVATION,
    }


def test_a_layer_split_sends_each_layer_once():
    deployment = Deployment(pcp=8, prefill_kv="layer_split")
    found = traffic(GLM, deployment, 64, context=1000, is_prefill=True).collectives
    copies = [c for c in found if c.purpose.startswith("copy")]
    assert sum(c.count * c.num_bytes for c in copies) == (64 + 1000) * (78 * 656 + 21 * 132)
    assert {c.kind for c in copies} == {"all-reduce"}


def test_no_messages_on_one_rank():
    step = StepTokens(4, 2, 1, 64, 4096)
    for model in ("glm-5.2", "deepseek-v3", "llama-3.1-8b"):
        for deployment in (Deployment(), Deployment(dp=8, draft_tokens=2)):
            shape = find_model(model)
            assert step_traffic(shape, deployment, step).num_messages == 0
            assert draft_traffic(shape, deployment, step).num_messages == 0


def test_further_drafts_are_of_one_token_a_sequence():
    """The draft layer has all tokens on every rank: it exchanges sums alone, DCP or not."""
    step = StepTokens(decode_rows=4, decode_width=4, context=4096)
    one, three = (
        draft_traffic(GLM, Deployment(tp=8, dcp=8, draft_tokens=drafts), step) for drafts in (1, 3)
    )
    assert one.num_messages == 4 and three.num_messages == 3 * one.num_messages
    hidden = 4 * GLM.hidden_size * ACTIVATION
    choice = 2 * 8 * 4 * 4
    assert three.num_bytes - one.num_bytes == 2 * (3 * hidden + choice)
    assert draft_traffic(GLM, Deployment(tp=8, dcp=8), step).collectives == ()
    assert three == draft_traffic(GLM, Deployment(tp=8, draft_tokens=3), step)


def test_queries_are_not_gathered_over_tokens_of_a_latent_cache():
    deployment = Deployment(tp=8, dcp=8, prefill_gather="q")
    with pytest.raises(UnsupportedCombination, match="latent"):
        traffic(GLM, deployment, 64, is_prefill=True)
    for wrong in ({"pcp": 2}, {"tp": 2}):
        with pytest.raises(UnsupportedCombination, match="prefill_gather='q'"):
            Deployment(prefill_gather="q", **wrong)


def test_heads_are_not_exchanged_among_ranks_that_have_the_same():
    with pytest.raises(UnsupportedCombination, match="a2a.*pcp=2"):
        Deployment(pcp=2, dcp=2, prefill_kv="sharded", exchange="a2a")


def test_whole_index_keys_and_split_layers_exclude_each_other():
    with pytest.raises(UnsupportedCombination, match="index_kv"):
        Deployment(pcp=2, prefill_kv="layer_split", index_kv="replicated")
