"""What a follower reads of a step is what the leader has written."""

from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from dcpjax.engine.device_tokens import DraftSeeds
from dcpjax.engine.link_messages import MAX_FRAME_BYTES, RowOf, RunStep, decode, encode
from dcpjax.engine.orders import StepOrder, from_message, to_message
from dcpjax.engine.request import Request, SamplingParams
from dcpjax.engine.sampler import CountsReset, Position, Sampler
from dcpjax.engine.step import StepShape
from dcpjax.errors import ConfigError, EngineDeadError

SHAPES = [StepShape(1, 0, 0, 4), StepShape(2, 1, 8, 4)]
PARAMS: dict[str, Any] = {"temperature": 0.7, "seed": 3, "logit_bias": ((5, 1.5),), "logprobs": 1}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(jax.devices()[0], vocab_size=32, max_num_seqs=2, max_rows=3, seed=0)


def order_of(sampler: Sampler, *, is_sampled: bool) -> StepOrder:
    """A step of the second shape with a request that began anew."""
    params = SamplingParams(**PARAMS, repetition_penalty=1.5)
    request = Request("a", (3, 1, 3), params, slot=1, output_token_ids=[4, 4], num_pending=1)
    reset = CountsReset.of(request)
    assert reset is not None
    shape = SHAPES[1]
    return StepOrder(
        shape=shape,
        packed=np.arange(shape.packed_size, dtype=np.int32),
        resets=(reset,),
        outputs=(0, 2),
        sampling=sampler.order(shape.num_outputs, {0: Position(request)}) if is_sampled else None,
        seeds=DraftSeeds.of(shape, {0: request}, sampler.seed_words),
        rows={"a": 0},
    )


def comparable(order: StepOrder) -> Any:
    """Everything but the requests, as lists."""
    sampling = order.sampling
    return [
        order.shape,
        order.packed.tolist(),
        [(one.slot, one.prompt.tolist(), one.outputs.tolist()) for one in order.resets],
        order.outputs,
        sampling and (sampling.form, {n: v.tolist() for n, v in sampling.inputs.items()}),
        [values.tolist() for values in order.seeds],
    ]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_an_order_survives_its_way(sampler: Sampler, is_sampled: bool):
    order = order_of(sampler, is_sampled=is_sampled)
    message = decode(encode(to_message(order, SHAPES)))
    assert isinstance(message, RunStep)
    found = from_message(message, SHAPES, sampler.blank_inputs)
    assert comparable(found) == comparable(order)
    assert found.rows == {}
    assert order.resets[0].prompt.tolist() == [1, 3] and order.resets[0].outputs.tolist() == [4, 4]


def test_a_request_without_penalties_resets_nothing():
    assert CountsReset.of(Request("a", (1,), SamplingParams(**PARAMS), slot=0)) is None


@pytest.mark.parametrize("frame", [b"", b"\x80", b"GET / HTTP/1.1", msgspec.msgpack.encode({})])
def test_what_is_no_message_is_refused(frame: bytes):
    with pytest.raises(ConfigError, match="only their messages"):
        decode(frame)


def test_messages_are_bounded():
    with pytest.raises(EngineDeadError, match="not longer"):
        encode(RowOf(bytes(MAX_FRAME_BYTES)))
