"""Where decode context parallelism starts to win: the context from which a step gets shorter."""

from dataclasses import replace

from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device
from dcpjax.planner.models import ModelShape
from dcpjax.planner.steps import decode_step


def dcp_crossover(
    model: ModelShape, device: Device, deployment: Deployment, batch: int
) -> int | None:
    """Least context, in steps of 1K tokens, from which the deployment's DCP is as fast as TP.

    None where it is slower at every context that the model allows. The time of a step grows with
    the context in both, so the difference is searched by halving.
    """
    tensor_parallel = replace(deployment, dcp=1)

    def gain(kilo_tokens: int) -> float:
        context = 1024 * kilo_tokens
        sharded = decode_step(model, device, deployment, batch, context).seconds
        return decode_step(model, device, tensor_parallel, batch, context).seconds - sharded

    low, high = 1, max(1, model.max_context // 1024)
    if gain(high) < 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) >= 0 else (middle + 1, high)
    return 1024 * low
