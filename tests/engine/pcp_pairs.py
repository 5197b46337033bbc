"""PCP engines that compute prompts, engines that go on with them, and what moves between them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dcpjax.engine.kv_moves import Moved
from dcpjax.models.checkpoint import open_checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.pair import Node, decode_request, hand_over, node, skip_without, transfer
from tests.engine.serving import Served, request_of
from tests.golden.tiny import random_tokens, write_tiny_model
from tests.golden.tiny_glm import write_tiny_glm

PAGE = 4
SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
    "block_size": PAGE,
    "num_pages": 60,
}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
SPLIT, DCP4 = "split 8", "dcp 4"
SOURCES: dict[str, dict[str, Any]] = {
    SPLIT: {"prefill_context_parallel_size": 8, "prefill_kv": "layer_split"},
    "tp 2, split 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "prefill_kv": "layer_split",
    },
    "sharded 4": {"prefill_context_parallel_size": 4, "decode_context_parallel_size": 4},
    "sharded 3, whole index": {
        "prefill_context_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "index_kv": "replicated",
    },
    "token by token": {
        "prefill_context_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 1,
    },
    "tp 2, sharded 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    "tp 2, sharded 4": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "replicated 2": {"prefill_context_parallel_size": 2},
    "tp 2, replicated 3": {"tensor_parallel_size": 2, "prefill_context_parallel_size": 3},
}
TARGETS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dcp 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "dcp 3": {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
    DCP4: {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
    "token by token": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 1,
    },
}
TOKENS, VOCABULARY = 10, 61
PROMPTS = {n: random_tokens(f"pcp {n}", n, VOCABULARY) for n in (1, 2, 9, 16, 17, 65)}
LONGER = 82
PROMPTS[LONGER] = PROMPTS[65] + PROMPTS[17]
DEEP_LAYERS, DEEP_CHOOSING = 9, 5
"""Eight ranks have two latents or one, and the keys of one layer or none."""
LATENT_BYTES, KEY_BYTES = (16 + 6) * 4, 12 * 4
"""Of a token in one layer of the deep model."""


def write_deep(folder) -> Any:
    types = [("full", "shared")[layer % 2] for layer in range(DEEP_LAYERS)]
    changed = {"num_hidden_layers": DEEP_LAYERS, "num_nextn_predict_layers": 1}
    return open_checkpoint(str(write_tiny_glm(folder, "periodic", indexer_types=types, **changed)))


MODELS = {
    "deep": write_deep,
    "glm": drafting_glm,
    "wide": lambda folder: drafting_glm(folder, kv_lora_rank=128),
    "gqa": lambda folder: open_checkpoint(
        str(write_tiny_model(folder, "gqa", num_hidden_layers=3))
    ),
}
CACHES = {"wide": {"kv_cache_dtype": "fp8_ds_mla"}}
"""Values of 8 bits with scales, where latents are wide enough for them."""
MOST_ENGINES = 5
CONNECTORS = ("InProcessConnector", "NixlConnector", "MooncakeConnector")


@dataclass
class Pair:
    """Two engines, what has moved between them, and what one engine says alone."""

    source: Node
    target: Node
    expected: Mapping[int, list[int]]
    moved: list[Moved]

    def hand_over(self, length: int, *, is_known: bool = False) -> Served:
        """A prompt through both; the target has nothing of it, or what it had of one before."""
        if not is_known:
            self.target.engine.reset_prefix_cache()
        self.moved.clear()
        return hand_over(
            self.source, self.target, PROMPTS[length], max_tokens=TOKENS, ignore_eos=True
        )

    def go_on(self, prompt: Sequence[int], offer: Mapping[str, Any]) -> list[int]:
        """What the target says to an offer, of which it has nothing yet."""
        self.target.engine.reset_prefix_cache()
        request = decode_request(prompt, offer, max_tokens=TOKENS, ignore_eos=True)
        self.target.engine.add(request)
        self.target.run(request.request_id)
        return self.target.served[request.request_id].tokens

    @property
    def last_transfer(self) -> dict[str, Any]:
        """As the side that moves shows it: the target reads, or the source writes."""
        sides = [side.engine.stats()["kv_transfer"] for side in (self.target, self.source)]
        return next(side["last_transfer"] for side in sides if side["last_transfer"])

    def token_bytes(self, part: str) -> int:
        return self.target.engine.runner.memory[part][0].token_bytes

    def drain(self) -> None:
        """Nobody holds a page any more, and nothing has failed."""
        for side in (self.source, self.target):
            side.drain()
            assert side.engine.stats()["kv_transfer"]["num_failed"] == 0


@dataclass
class Engines:
    """Opened when they are asked for, and the last few kept: programs take mappings of memory, of
    which a process has so many."""

    tmp_path: Any
    moved: list[Moved] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    opened: dict[tuple, tuple[Node, ExitStack]] = field(default_factory=dict)
    expected: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    def pair(self, model: str, source: str, target: str, connector: str, **changes: Any) -> Pair:
        """With drafts of the model's own where it has them, except in one that is alone."""
        skip_without(connector)
        expected = self._alone(model)
        sides = (
            self._node(model, source, "kv_producer", connector, changes),
            self._node(model, target, "kv_consumer", connector, {}),
        )
        return Pair(*sides, expected, self.moved)

    def _node(
        self, model: str, shape: str, role: str, connector: str, changes: Mapping[str, Any]
    ) -> Node:
        key = (model, shape, role, connector, *changes.items())
        if key not in self.opened:
            self.close(but=MOST_ENGINES - 1)
            is_source = role == "kv_producer"
            settings = SMALL | CACHES.get(model, {}) | (SOURCES if is_source else TARGETS)[shape]
            if model != "gqa" and shape != "alone":
                settings |= MTP
            config = {"pipelined_sends": is_source, **changes}
            made = node(self._model(model), **settings, **transfer(role, connector, **config))
            closing = ExitStack()
            self.opened[key] = closing.enter_context(made), closing
        self.opened[key] = self.opened.pop(key)  # the last one used
        return self.opened[key][0]

    def close(self, *, but: int = 0) -> None:
        """All but the last few that were used."""
        for key in list(self.opened)[: len(self.opened) - but]:
            self.opened.pop(key)[1].close()

    def _model(self, name: str) -> Any:
        if name not in self.models:
            self.models[name] = MODELS[name](self.tmp_path / name)
        return self.models[name]

    def _alone(self, model: str) -> dict[int, list[int]]:
        """What one engine says that computes everything on one device, without drafts."""
        if model not in self.expected:
            alone = self._node(model, "alone", "kv_consumer", CONNECTORS[0], {})
            for length, prompt in PROMPTS.items():
                request = request_of(f"{length}", prompt, max_tokens=TOKENS, ignore_eos=True)
                alone.engine.add(request)
            alone.run(*map(str, PROMPTS))
            self.expected[model] = {n: alone.served[f"{n}"].tokens for n in PROMPTS}
        return self.expected[model]
