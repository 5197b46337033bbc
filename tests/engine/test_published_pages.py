"""What other engines are told of is in the pages of every process, also of one that is slow.

An engine of one process stands for the leader. The pages of its last rank are those of a follower
that does what it is told as late as it may: a step only when the leader waits for it, drafts only
when the leader asks it to publish pages.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dcpjax.cache.parts import DRAFT_PARTS
from dcpjax.engine import blueprint, sampler
from dcpjax.engine.processes import OneProcess
from dcpjax.engine.remote_kv import KVExport
from tests.engine.drafting_glm import drafting_glm
from tests.engine.pair import Node, ask_prefill, begin_prefill, node, transfer
from tests.engine.pcp_pairs import MTP, PAGE, SMALL, VOCABULARY
from tests.golden.tiny import random_tokens

FOLLOWER = 1  # its rank, in a layer split of two
SOURCE = {"prefill_context_parallel_size": 2, "prefill_kv": "layer_split"}
PROMPT = random_tokens("published", 12 * PAGE, VOCABULARY)  # three chunks; its last page is full
Pages = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    model = drafting_glm(tmp_path_factory.mktemp("published") / "glm")
    settings = SMALL | SOURCE | MTP | transfer("kv_producer", pipelined_sends=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blueprint, "decode_buckets", lambda least, most: (most,))
        patch.setattr(sampler, "_SEGMENT_BUCKETS", ())
        with node(model, **settings) as producer:
            yield producer


class Late(OneProcess):
    """With a follower; ``leaves_out`` names what it does not wait for."""

    def __init__(self, pages: Callable[[], Pages], leaves_out: str | None) -> None:
        self._pages, self._leaves_out = pages, leaves_out
        self.has = pages()  # what can be read of the follower

    def confirm(self, witness: Callable[[], int]) -> None:
        self._catch_up("confirm", lambda part: part not in DRAFT_PARTS)

    def meet(self) -> None:
        self._catch_up("meet", lambda part: part in DRAFT_PARTS)

    def _catch_up(self, name: str, writes: Callable[[str], bool]) -> None:
        if name != self._leaves_out:
            new = {part: pages for part, pages in self._pages().items() if writes(part)}
            self.has = {**self.has, **new}


class Watched:
    """A producer with a late follower, and what could be read of it when it told of more."""

    def __init__(
        self, producer: Node, leaves_out: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._memory = producer.engine.runner.memory
        self.processes = Late(self.pages, leaves_out)
        self.seen: list[tuple[Sequence[int], Pages]] = []
        self._page_ids: Sequence[int] = ()
        source = producer.engine._handoff._source
        export, advance = source.export, source.advance

        def exporting(offer: KVExport, *, num_ready: int | None = None) -> dict[str, Any]:
            self._page_ids = offer.page_ids
            self._look(offer.num_tokens if num_ready is None else num_ready)
            return export(offer, num_ready=num_ready)

        def advancing(request_id: str, num_ready: int) -> None:
            self._look(num_ready)
            advance(request_id, num_ready)

        for owner in (producer.engine, producer.engine.runner):
            monkeypatch.setattr(owner, "_processes", self.processes)
        monkeypatch.setattr(source, "export", exporting)
        monkeypatch.setattr(source, "advance", advancing)

    def pages(self) -> Pages:
        """Copies of the pages of the follower's rank as they are now, by part."""
        return {part: read(regions[FOLLOWER]) for part, regions in self._memory.items()}

    def _look(self, num_ready: int) -> None:
        self.seen.append((self._page_ids[: num_ready // PAGE], self.processes.has))

    def was_right(self) -> bool:
        """Whether all that could be read is what there is in the end."""
        now = self.pages()
        return all(
            np.array_equal(pages[list(ids)], now[part][list(ids)])
            for ids, seen in self.seen
            for part, pages in seen.items()
        )


def read(region: Any) -> np.ndarray:
    """[pages, bytes], a copy."""
    memory = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
    return np.frombuffer(memory, np.uint8).reshape(region.num_pages, -1).copy()


@pytest.mark.parametrize("ask", [ask_prefill, begin_prefill])
@pytest.mark.parametrize("leaves_out", [None, "confirm", "meet"])
def test_pages_are_told_of_when_every_process_has_them(
    producer: Node, ask: Any, leaves_out: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Each of the two waits is needed, for a finished prompt and for one that is told of early."""
    producer.engine.reset_prefix_cache()
    for regions in producer.engine.runner.memory.values():  # nothing of the test before
        ctypes.memset(regions[FOLLOWER].address, 0xA5, regions[FOLLOWER].num_bytes)
    watched = Watched(producer, leaves_out, monkeypatch)
    offer = ask(producer, PROMPT)
    producer.run(offer["remote_request_id"])
    assert watched.seen[-1][0] == tuple(offer["remote_block_ids"])
    assert len(watched.seen) > 2 if ask is begin_prefill else len(watched.seen) == 1
    assert watched.was_right() == (leaves_out is None)
    producer.engine._handoff._export_ended(offer["remote_request_id"])
