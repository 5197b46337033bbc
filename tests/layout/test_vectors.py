"""The worked examples of other systems in ``tests/vectors``, as far as they concern the layout."""

import json
from pathlib import Path

import numpy as np
import pytest

from dcpjax.layout import (
    KVPlacement,
    decode_groups,
    filter_pages,
    global_page,
    layer_owner,
    layer_range,
    local_filled,
    local_page,
    page_owner,
    slot_mapping,
    zigzag_chunks,
)

FOLDER = Path(__file__).parents[1] / "vectors"


def cases_of(name):
    """Parametrise over ``inputs, expected`` of one file."""
    cases = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    return pytest.mark.parametrize(
        "inputs, expected", [(case["inputs"], case["expected"]) for case in cases]
    )


def split_of(inputs):
    return {"ranks": inputs["ranks"], "interleave": inputs["interleave"]}


@cases_of("slot_mapping")
def test_slot_mapping(inputs, expected):
    slots = slot_mapping(
        inputs["page_table"],
        np.arange(inputs["num_positions"]),
        inputs["rank"],
        page_size=inputs["page_size"],
        **split_of(inputs),
    )
    assert slots.tolist() == expected["slots"]


@cases_of("local_lengths")
def test_local_lengths(inputs, expected):
    lengths = [
        local_filled(inputs["length"], rank, **split_of(inputs)) for rank in range(inputs["ranks"])
    ]
    assert lengths == expected["local_lengths"]


@cases_of("page_plan")
def test_owners_of_planned_pages(inputs, expected):
    """A page's place in the sequence is its global page; the target's table turns it into an id."""
    ranks = inputs["ranks"]
    source = np.array(inputs["source_pages"])
    places = inputs["source_page_offset"] + np.arange(len(source))
    virtual = np.array(inputs["target_pages"])[local_page(places, ranks=ranks)]
    holders = page_owner(inputs["prefix_tokens"] // inputs["page_size"] + places, ranks=ranks)
    pages = global_page(virtual, holders, ranks=ranks)
    assert {"source": source.tolist(), "target": pages.tolist()} == expected["replicated"]
    for share in expected["sharded"]:
        assert filter_pages(pages, share["rank"], ranks=ranks).tolist() == share["target"]
        assert source[page_owner(pages, ranks=ranks) == share["rank"]].tolist() == share["source"]


@cases_of("token_plan")
def test_slots_of_planned_tokens(inputs, expected):
    """Tokens after a prefix of whole virtual pages have the slots of a sequence of their own."""
    ranks, page_size = inputs["ranks"], inputs["page_size"]
    assert inputs["prefix_tokens"] % (ranks * page_size) == 0
    tokens = np.arange(inputs["num_tokens"])
    first = inputs["source_page_offset"] * page_size
    whole = {"ranks": 1, "interleave": 1, "page_size": page_size}
    source = slot_mapping(inputs["source_pages"], tokens, 0, **whole)
    for share in expected["sharded"]:
        split = {"ranks": ranks, "interleave": 1, "page_size": page_size}
        target = slot_mapping(inputs["target_pages"], first + tokens, share["rank"], **split)
        assert target[target >= 0].tolist() == share["target"]
        assert source[target >= 0].tolist() == share["source"]


@cases_of("pcp_rows")
def test_chunks_of_rows(inputs, expected):
    assert all(inputs["prefilling"]) and len(inputs["scheduled"]) == 1, "chunks of one prompt"
    (num_tokens,) = inputs["scheduled"]
    for rank, segments in enumerate(expected["segments"]):
        chunks = zigzag_chunks(num_tokens, inputs["ranks"], rank)
        filled = [[start, stop] for start, stop in chunks if start < stop]
        assert sorted(filled) == sorted(segment[1:] for segment in segments)
        assert sum(stop - start for start, stop in chunks) == expected["counts"][rank]


@cases_of("process_groups")
def test_process_groups(inputs, expected):
    groups = decode_groups(inputs["tp"], inputs["dcp"], inputs["pcp"])
    assert groups == expected["dcp_groups"]


@cases_of("layer_split")
def test_layer_split(inputs, expected):
    num_layers, ranks = inputs["num_layers"], inputs["ranks"]
    ranges = [list(layer_range(num_layers, ranks, rank)) for rank in range(ranks)]
    assert ranges == expected["ranges"]
    owners = [layer_owner(layer, num_layers, ranks) for layer in range(num_layers)]
    assert owners == [r for r, (start, stop) in enumerate(ranges) for _ in range(start, stop)]


@cases_of("nixl_tp_mapping")
def test_named_source_ranks_hold_the_heads(inputs, expected):
    cache = {"layers": 1, "kv_heads": inputs["num_kv_heads"], "page_size": 16}
    prefill = KVPlacement.tensor_parallel(inputs["prefill_tp"], **cache).shares
    decode = KVPlacement.tensor_parallel(inputs["decode_tp"], **cache).shares
    for case in expected["ranks"]:
        target = decode[case["decode_rank"]]
        sources = [prefill[rank] for rank in case["source_ranks"]]
        held = {head for s in sources for head in range(s.head_start, s.head_stop)}
        assert held >= set(range(target.head_start, target.head_stop))
        if target.num_heads <= sources[0].num_heads:
            offset = target.head_start - sources[0].head_start
            assert offset == case["head_offset"] * target.num_heads


def test_a_wrong_vector_is_noticed():
    """The twin of the tests above: shifted by one rank, the first case no longer agrees."""
    case = json.loads((FOLDER / "slot_mapping.json").read_text())["cases"][0]
    shifted = {**case["inputs"], "rank": 1 - case["inputs"]["rank"]}
    with pytest.raises(AssertionError):
        test_slot_mapping(shifted, case["expected"])
