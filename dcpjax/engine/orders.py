"""One step as every process of an engine runs it: all that the host says, without requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcpjax.engine.device_tokens import DraftSeeds
from dcpjax.engine.link_messages import ResetCounts, RunStep, SampleRows
from dcpjax.engine.sampler import CountsReset, SampleOrder, SamplingForm
from dcpjax.engine.step import StepShape


@dataclass(frozen=True)
class StepOrder:
    """Run one step and choose its tokens.

    Attributes:
        packed: int32 [shape.packed_size].
        resets: sampling slots that begin anew.
        outputs: those of the step that are chosen, ascending.
        sampling: None where the step's own choice, the most likely token, is the one.
        seeds: for drafts on the devices.
        rows: of the requests that sample, by id; empty on a follower, which has no requests.
    """

    shape: StepShape
    packed: np.ndarray
    resets: tuple[CountsReset, ...]
    outputs: tuple[int, ...]
    sampling: SampleOrder | None
    seeds: DraftSeeds
    rows: Mapping[str, int]


def to_message(order: StepOrder, shapes: Sequence[StepShape]) -> RunStep:
    """The order for the followers, which have compiled the same ``shapes``."""
    sampling = order.sampling
    return RunStep(
        shape=shapes.index(order.shape),
        packed=order.packed.tobytes(),
        resets=[
            ResetCounts(one.slot, one.prompt.tobytes(), one.outputs.tobytes())
            for one in order.resets
        ],
        outputs=np.asarray(order.outputs, np.int32).tobytes(),
        sampling=None
        if sampling is None
        else SampleRows(
            sampling.form.rows,
            sampling.form.with_filters,
            sampling.form.with_logprobs,
            {name: values.tobytes() for name, values in sampling.inputs.items()},
        ),
        seeds=order.seeds.seeds.tobytes(),
        counters=order.seeds.counters.tobytes(),
    )


def from_message(
    message: RunStep,
    shapes: Sequence[StepShape],
    blank_inputs: Callable[[int], Mapping[str, np.ndarray]],
) -> StepOrder:
    """The order of the leader; ``blank_inputs`` are those of so many rows of the sampler."""
    shape, sampling = shapes[message.shape], None
    if message.sampling is not None:
        rows, found = message.sampling.rows, message.sampling
        form = SamplingForm(rows, found.with_filters, found.with_logprobs)
        blank = blank_inputs(rows).items()
        inputs = {name: _like(found.inputs[name], values) for name, values in blank}
        sampling = SampleOrder(form, inputs)
    return StepOrder(
        shape=shape,
        packed=_int32(message.packed),
        resets=tuple(
            CountsReset(one.slot, _int32(one.prompt), _int32(one.outputs)) for one in message.resets
        ),
        outputs=tuple(_int32(message.outputs).tolist()),
        sampling=sampling,
        seeds=DraftSeeds(
            np.frombuffer(message.seeds, np.uint32).reshape(-1, 2), _int32(message.counters)
        ),
        rows={},
    )


def _int32(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.int32)


def _like(raw: bytes, blank: np.ndarray) -> np.ndarray:
    return np.frombuffer(raw, blank.dtype).reshape(blank.shape)
