"""An engine on virtual devices, and requests run through it to their end."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine import blueprint, sampler
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from dcpjax.models.checkpoint import Checkpoint
from tests.engine.programs import shared_programs

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "block_size": 8,
}
"""Three shapes to compile: one decode row, two, and a prompt chunk beside two."""


@dataclass
class Served:
    """All outputs of one request, joined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0

    def add(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason, self.stop_token_id = output.finish_reason, output.stop_token_id
        self.num_cached_tokens += output.num_cached_tokens


def engine_of(checkpoint: Checkpoint, **settings: Any) -> Engine:
    """An engine with SMALL settings, where ``settings`` do not say otherwise."""
    config = EngineConfig.from_settings(str(checkpoint.path), SMALL | settings)
    with shared_programs():
        return Engine(config, checkpoint)


@contextmanager
def opening_engines() -> Iterator[Callable[..., Engine]]:
    """:func:`engine_of` with one bucket of decode rows and of sampled ones: little to compile.

    The engines are closed at the end.
    """
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(blueprint, "decode_buckets", lambda least, most: (most,))
        patch.setattr(sampler, "_SEGMENT_BUCKETS", ())

        def open_one(checkpoint: Checkpoint, **settings: Any) -> Engine:
            engine = engine_of(checkpoint, **settings)
            opened.callback(engine.close)
            return engine

        yield open_one


def request_of(name: str, prompt: Sequence[int], *, eos: Iterable[int] = (), **params: Any):
    """A greedy request, if ``params`` do not say otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **params})
    return Request(name, tuple(prompt), params, eos_token_ids=frozenset(eos))


def serve(engine: Engine, requests: Iterable[Request]) -> dict[str, Served]:
    """Run requests to their end, all together; pages and compilations are checked."""
    requests = list(requests)
    for request in requests:
        engine.add(request)
    served = finish(engine)
    assert served.keys() == {request.request_id for request in requests}
    return served


def finish(engine: Engine) -> dict[str, Served]:
    """Step until no work is left."""
    served: dict[str, Served] = defaultdict(Served)
    while engine.has_work:
        for output in engine.step():
            served[output.request_id].add(output)
    engine.check_integrity()
    assert all(item.finish_reason is not None for item in served.values())
    assert engine.stats()["compilations_after_warmup"] == 0
    return served
