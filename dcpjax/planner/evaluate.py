"""How a cluster does under a demand: a closed queueing estimate, without a trace.

Users send a request, wait for the answer and send the next. Prompts queue before the prefill
engines (one server each, constant service), answers are generated in batches that memory limits.
The throughput X is the one at which ``concurrency = X · (time of a request + think time)``, by
Little's law.
"""

import functools
from dataclasses import dataclass

from dcpjax.planner.candidates import Candidate
from dcpjax.planner.demand import Demand
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import GIB, Device
from dcpjax.planner.memory import Capacity, deployment_parts
from dcpjax.planner.models import ModelShape
from dcpjax.planner.step_times import EstimatedSteps
from dcpjax.planner.steps import acceptance_length, decode_step, prefill_step
from dcpjax.planner.transfers import transfer_cost

CHUNK = 8192
"""Prompt tokens of a step."""
FULL = 0.9
"""Share of a limit from which it is the bottleneck."""


@dataclass(frozen=True)
class Setting:
    """What a cluster is judged under. ``acceptance`` None: as measured for the model."""

    model: ModelShape
    device: Device
    demand: Demand
    host_gib: float = 0.0
    acceptance: float | None = None

    def accepted(self, deployment: Deployment) -> float:
        """Tokens of a decode step."""
        if deployment.draft_tokens and self.acceptance is not None:
            return self.acceptance
        return acceptance_length(self.model, deployment.draft_tokens)


@dataclass(frozen=True)
class Point:
    """A cluster under a demand.

    Attributes:
        requests_per_second: of the whole cluster.
        device_throughput: prompt and output tokens per second and device.
        interactivity: output tokens per second that a user sees, the wait for the first included.
        batch: sequences that each copy of a decode engine generates at the same time.
        max_batch: as memory allows.
        hit_rate: share of prompt tokens that caches still have.
    """

    candidate: Candidate
    concurrency: int
    requests_per_second: float
    device_throughput: float
    interactivity: float
    ttft: float
    tpot: float
    transfer_seconds: float
    prefill_busy: float
    batch: float
    max_batch: int
    hit_rate: float
    bottleneck: str


def evaluate(
    setting: Setting,
    candidate: Candidate,
    prefill_room: Capacity | None,
    decode_room: Capacity,
) -> Point:
    """Judge one cluster.

    Args:
        prefill_room, decode_room: what fits into one engine of either side.
    """
    demand = setting.demand
    hits = kept_hit_rate(setting, candidate, prefill_room or decode_room)
    source = candidate.prefill or candidate.decode
    servers = source.dp * (candidate.num_prefill if candidate.prefill else candidate.num_decode)
    prompt = prompt_seconds(setting, source, hits)
    transfer = 0.0
    if candidate.prefill is not None:
        cost = transfer_cost(setting.model, source, candidate.decode, demand.num_input)
        transfer = cost.seconds(setting.device) * (1 - hits)
    copies = candidate.num_decode * candidate.decode.dp
    length = demand.num_input + demand.num_output
    max_batch = decode_room.num_requests(length) // candidate.decode.dp
    queue = _Queue(
        steps=EstimatedSteps(setting.model, setting.device, candidate.decode),
        accepted=setting.accepted(candidate.decode),
        context=demand.num_input + demand.num_output // 2,
        num_output=demand.num_output,
        prompt=prompt,
        servers=servers,
        copies=copies,
        max_batch=max_batch,
        transfer=transfer,
        is_split=candidate.prefill is not None,
    )
    rate = queue.solve(demand.concurrency, demand.think)
    return _point(setting, candidate, queue, rate, hits)


def kept_hit_rate(setting: Setting, candidate: Candidate, room: Capacity) -> float:
    """The demand's hit rate, as far as the prefixes of all users find room.

    Each user comes back with the prefix of the last turn; what does not fit into the caches of the
    engines that compute prompts, or into the host's memory, is computed again.
    """
    demand = setting.demand
    engines = candidate.num_prefill or candidate.num_decode
    token_bytes = sum(part.total for part in deployment_parts(setting.model, room.deployment))
    host_tokens = setting.host_gib * GIB / token_bytes
    kept = engines * (room.total_tokens + host_tokens)
    return demand.hit_rate * min(1.0, kept / (demand.concurrency * demand.num_input))


@functools.lru_cache(maxsize=4096)
def prompt_seconds(setting: Setting, deployment: Deployment, hits: float) -> float:
    """Of one prompt on one copy of an idle engine, chunk by chunk."""
    demand = setting.demand
    prior = int(demand.num_input * hits)
    steps = EstimatedSteps(setting.model, setting.device, deployment)
    seconds = 0.0
    for start in range(prior, demand.num_input, CHUNK):
        seconds += steps.prefill(min(CHUNK, demand.num_input - start), start)
    return seconds


@dataclass(frozen=True)
class _Queue:
    """The numbers of one cluster that its times follow from."""

    steps: EstimatedSteps
    accepted: float
    context: int
    num_output: int
    prompt: float
    servers: int
    copies: int
    max_batch: int
    transfer: float
    is_split: bool

    def tpot(self, batch: float) -> float:
        """Seconds per token in a batch, between whole batches along a line."""
        low = max(1, int(batch))
        first, second = (self._tpot(count) for count in (low, low + 1))
        return first + (second - first) * max(0.0, batch - low)

    def _tpot(self, batch: int) -> float:
        fixed, per_token = self.steps.decode(batch)
        return (fixed + per_token * batch * self.context) / self.accepted

    def generation(self, batch: float) -> float:
        """Seconds of an answer whose steps nothing comes between."""
        return self.num_output * self.tpot(batch)

    @property
    def most(self) -> float:
        """Requests per second that neither side exceeds."""
        answers = self.max_batch * self.copies / self.generation(self.max_batch)
        prompts = self.servers / self.prompt
        return min(answers, prompts) if self.is_split else 1 / (1 / answers + 1 / prompts)

    def batch(self, rate: float) -> float:
        """Sequences in each copy's batch at a throughput, by Little's law."""
        low, high = 0.0, float(self.max_batch)
        for _ in range(40):
            middle = (low + high) / 2
            if middle * self.copies < rate * self._stretched(middle, rate):
                low = middle
            else:
                high = middle
        return high

    def _stretched(self, batch: float, rate: float) -> float:
        """Seconds of an answer, with the prompts that are computed between its steps."""
        seconds = self.generation(batch)
        return seconds if self.is_split else seconds / max(1e-9, 1 - self.busy(rate))

    def busy(self, rate: float) -> float:
        """Share of the time in which prompts are computed."""
        return min(1.0, rate * self.prompt / self.servers)

    def wait(self, rate: float) -> float:
        """Before a prompt, M/D/1."""
        busy = min(0.999, self.busy(rate))
        return busy * self.prompt / (2 * (1 - busy))

    def total(self, rate: float) -> float:
        """Seconds of a request."""
        before = self.wait(rate) + self.prompt + self.transfer
        return before + self._stretched(self.batch(rate), rate)

    def solve(self, concurrency: int, think: float) -> float:
        """Requests per second of so many users."""
        low, high = 0.0, self.most
        if high * (self.total(high) + think) <= concurrency:
            return high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if middle * (self.total(middle) + think) < concurrency
                else (low, middle)
            )
        return low


def _point(
    setting: Setting, candidate: Candidate, queue: _Queue, rate: float, hits: float
) -> Point:
    demand = setting.demand
    batch = queue.batch(rate)
    request = demand.concurrency / rate - demand.think  # with the wait for room, where there is one
    stretch = 1.0 if queue.is_split else 1 / max(1e-9, 1 - queue.busy(rate))
    tpot = queue.tpot(batch) * stretch
    tokens = demand.num_input + demand.num_output
    return Point(
        candidate=candidate,
        concurrency=demand.concurrency,
        requests_per_second=rate,
        device_throughput=rate * tokens / candidate.num_devices,
        interactivity=demand.num_output / request,
        ttft=request - (demand.num_output - 1) * tpot,
        tpot=tpot,
        transfer_seconds=queue.transfer,
        prefill_busy=queue.busy(rate),
        batch=batch,
        max_batch=queue.max_batch,
        hit_rate=hits,
        bottleneck=_bottleneck(setting, candidate, queue, rate, batch),
    )


def _bottleneck(
    setting: Setting, candidate: Candidate, queue: _Queue, rate: float, batch: float
) -> str:
    """What limits a cluster, in words."""
    source = candidate.prefill or candidate.decode
    if queue.busy(rate) >= FULL:
        prior = setting.demand.num_input // 2
        step = prefill_step(setting.model, setting.device, source, CHUNK, prior)
        return f"prefill: {step.bottleneck()}"
    if batch >= FULL * queue.max_batch:
        return "decode: memory for KV"
    whole = max(1, round(batch))
    step = decode_step(setting.model, setting.device, candidate.decode, whole, queue.context)
    return f"decode: {step.bottleneck()}"
