"""What the next step computes. Host only: no arrays, no devices, no clock."""

from dataclasses import dataclass

from dcpjax.engine.request import Request


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens ``[start, start + num_tokens)`` of one request, computed in one step.

    ``samples``: these are the last tokens known so far, so the step yields the next one.
    ``token_is_pending``: the single token of this decode segment was sampled by the step before
    and is still on the device.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    token_is_pending: bool = False


@dataclass(frozen=True)
class StepPlan:
    """One step: decode segments of one token each, and prompt chunks of at most ``prefill_width``."""

    decode: tuple[Segment, ...] = ()
    prefill: tuple[Segment, ...] = ()
    prefill_width: int = 0
