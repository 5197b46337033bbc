"""The host side of sampling: requests to arrays of parameters, tokens to Python integers.

Runs on one device. Steps whose rows are all greedy never come here: the step itself has their
tokens.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dcpjax.engine.consensus import key_of
from dcpjax.engine.request import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, Request, TokenLogprobs
from dcpjax.errors import RequestError
from dcpjax.sampling import (
    SampleResult,
    SamplingInputs,
    SamplingState,
    init_state,
    reset_rows,
    sample,
)

T = TypeVar("T")

_BIAS_WIDTH = MAX_BIASED_TOKENS + MAX_STOP_TOKEN_IDS + 4  # and a few end-of-sequence ids
_NO_TOKEN = -1
_TAKEN_FROM_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SEGMENT_BUCKETS = (1, 4)
"""Decode segments whose rows sampling is compiled for, beside the most rows that a step has."""
_FLAGS = ((False, False), (True, False), (True, True))
"""(with_filters, with_logprobs) that are compiled."""


@dataclass(frozen=True)
class SamplingForm:
    """One compiled program of sampling."""

    rows: int
    with_filters: bool
    with_logprobs: bool

    def __str__(self) -> str:
        extras = " filters" * self.with_filters + " logprobs" * self.with_logprobs
        return f"sampling of {self.rows}{extras}"


@dataclass(frozen=True)
class SampleOrder:
    """One call of sampling: its form, and the parameters of all rows by name."""

    form: SamplingForm
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class CountsReset:
    """The tokens that penalties of a slot count: those of the prompt, and outputs one by one."""

    slot: int
    prompt: np.ndarray
    outputs: np.ndarray

    @classmethod
    def of(cls, request: Request) -> "CountsReset | None":
        """For a request that got its slot, if penalties need it: the counts of the others mean
        nothing, tokens behind rejected drafts are among them."""
        if not request.params.has_penalties:
            return None
        assert request.slot is not None, "only running requests have counts"
        prompt = np.unique(np.asarray(request.prompt_token_ids, np.int32))
        return cls(request.slot, prompt, np.asarray(request.output_token_ids, np.int32))


class Position(NamedTuple):
    """Which token of a request a row chooses: ``offset`` behind the next one."""

    request: Request
    offset: int = 0

    @property
    def output_index(self) -> int:
        return self.request.next_output_index + self.offset


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of one step on the device; ``ids`` has one entry per output of the step, and padding.

    The ``rows`` of a segment follow each other, in the order of its tokens.
    """

    ids: Array
    rows: Mapping[int, Position]
    details: SampleResult | None = None

    def wait(self) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """Tokens, and log-probabilities where asked for, of each sampling segment in order."""
        ids = np.asarray(self.ids)
        tokens = self._by_segment({row: int(ids[row]) for row in self.rows})
        if self.details is None:
            return tokens, [[] for _ in tokens]
        details = {name: np.asarray(value) for name, value in self.details._asdict().items()}
        logprobs = self._by_segment(
            {row: _token_logprobs(details, row, self.rows[row].request) for row in self.rows}
        )
        return tokens, [[item for item in items if item is not None] for items in logprobs]

    def witness(self) -> int:
        """A number that is equal where the same tokens were chosen. Waits for them."""
        return witness_of(self.ids, tuple(self.rows))

    def _by_segment(self, values: Mapping[int, T]) -> list[list[T]]:
        """Values of rows as those of each segment."""
        segments: list[list[T]] = []
        for row, position in self.rows.items():
            if position.offset == 0:
                segments.append([])
            segments[-1].append(values[row])
        return segments


def witness_of(ids: Array, outputs: Sequence[int]) -> int:
    """A number that stands for what was chosen at these outputs of a step. Waits for them."""
    return key_of(np.asarray(ids)[list(outputs)].astype(np.int64).tobytes())


def _token_logprobs(
    details: dict[str, np.ndarray], row: int, request: Request
) -> TokenLogprobs | None:
    wanted = request.params.logprobs
    if wanted is None:
        return None
    ids, logprobs = (details[name][row, :wanted].tolist() for name in ("top_ids", "top_logprobs"))
    top = zip(ids, logprobs, strict=True)
    return TokenLogprobs(
        token_id=int(details["tokens"][row]),
        logprob=float(details["logprobs"][row]),
        rank=int(details["ranks"][row]),
        top=tuple(pair for pair in top if pair[0] != _NO_TOKEN),
    )


class Sampler:
    """Owns the per-sequence sampling state of one engine.

    Args:
        device: where logits arrive and tokens are chosen.
        max_rows: outputs of a step at most.
        seed: requests without a seed of their own derive one from this and their id.
        width: outputs of a decode segment.
    """

    def __init__(
        self,
        device: jax.Device,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_rows: int,
        seed: int,
        width: int = 1,
    ) -> None:
        self._place = jax.sharding.SingleDeviceSharding(device)
        self._seed, self._vocab_size = seed, vocab_size
        self._max_rows, self._no_slot = max_rows, max_num_seqs
        self._buckets = (*(width * segments for segments in _SEGMENT_BUCKETS), max_rows)
        self._state: SamplingState = jax.jit(
            partial(init_state, max_num_seqs, vocab_size), out_shardings=self._place
        )()
        self._programs: dict[SamplingForm, Callable] = {}
        self._reset = self._compile_reset()

    def bucket(self, rows: int) -> int:
        """Rows that logits of ``rows`` rows are padded to: few, they take long to compile."""
        return min(size for size in self._buckets if size >= rows)

    @property
    def programs(self) -> list[SamplingForm]:
        """What has to be compiled: every form for every number of rows."""
        buckets = sorted({self.bucket(rows) for rows in range(1, self._max_rows + 1)})
        return [SamplingForm(rows, *flags) for rows in buckets for flags in _FLAGS]

    def compile(self, form: SamplingForm) -> Callable:
        """Compile one of :attr:`programs`; may be called from several threads."""
        sample_rows = partial(_sample_padded, form=form, max_rows=self._max_rows)
        logits = np.zeros((form.rows, self._vocab_size), np.float32)
        inputs = SamplingInputs(**self._abstract(self._inputs({}, form.rows)))
        arguments = (*self._abstract((logits,)), inputs, self._abstract(self._state))
        return jax.jit(sample_rows, donate_argnums=2).lower(*arguments).compile()

    def install(self, programs: Mapping[SamplingForm, Callable]) -> None:
        """Use these compiled programs from now on."""
        self._programs = dict(programs)

    def _compile_reset(self) -> Callable:
        row = (np.zeros((1, self._vocab_size), dtype) for dtype in (np.int32, bool))
        arguments = self._abstract((self._state, np.zeros(1, np.int32), *row))
        return jax.jit(reset_rows, donate_argnums=0).lower(*arguments).compile()

    def _abstract(self, arrays: Any) -> Any:
        """Shapes and types of arrays that will be on this sampler's device."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), arrays
        )

    def reset(self, order: CountsReset) -> None:
        """Begin the counts of a slot anew."""
        counts = np.bincount(order.outputs, minlength=self._vocab_size).astype(np.int32)
        in_prompt = np.zeros(self._vocab_size, bool)
        in_prompt[order.prompt] = True
        row = (np.asarray([order.slot], np.int32), counts[None], in_prompt[None])
        self._state = self._reset(self._state, *jax.device_put(row, self._place))

    def order(self, num_rows: int, rows: Mapping[int, Position]) -> SampleOrder:
        """How to choose tokens for these rows of the logits of ``num_rows`` outputs."""
        params = [position.request.params for position in rows.values()]
        with_logprobs = any(p.logprobs is not None for p in params)
        with_filters = with_logprobs or any(p.has_filters for p in params)
        form = SamplingForm(self.bucket(num_rows), with_filters, with_logprobs)
        return SampleOrder(form, self._inputs(rows, form.rows))

    def blank_inputs(self, num_rows: int) -> dict[str, np.ndarray]:
        """Parameters of an order in which no row samples: their names, shapes and types."""
        return self._inputs({}, num_rows)

    def sample(
        self, logits: Array | np.ndarray, order: SampleOrder
    ) -> tuple[Array, SampleResult | None]:
        """Choose tokens for rows of ``logits`` [rows, V]; returns at once.

        Returns:
            tokens, see :class:`SampledTokens`, and the details where somebody asked for them.
        """
        inputs = SamplingInputs(**jax.device_put(dict(order.inputs), self._place))
        logits = jax.device_put(logits, self._place)
        program = self._programs[order.form]
        ids, result, self._state = program(logits, inputs, self._state)
        return ids, result if order.form.with_logprobs else None

    def _inputs(self, rows: Mapping[int, Position], num_rows: int) -> dict[str, np.ndarray]:
        """Parameters of all rows; those that do not sample are greedy, in the spare slot."""
        inputs = {
            "temperature": np.zeros(num_rows, np.float32),
            "top_k": np.zeros(num_rows, np.int32),
            "top_p": np.ones(num_rows, np.float32),
            "min_p": np.zeros(num_rows, np.float32),
            "repetition_penalty": np.ones(num_rows, np.float32),
            "presence_penalty": np.zeros(num_rows, np.float32),
            "frequency_penalty": np.zeros(num_rows, np.float32),
            "seed": np.zeros((num_rows, 2), np.uint32),
            "counter": np.zeros(num_rows, np.int32),
            "slot": np.full(num_rows, self._no_slot, np.int32),
            "bias_ids": np.full((num_rows, _BIAS_WIDTH), _NO_TOKEN, np.int32),
            "bias_values": np.zeros((num_rows, _BIAS_WIDTH), np.float32),
        }
        for row, position in rows.items():
            self._fill(inputs, row, position)
        return inputs

    def _fill(self, inputs: dict[str, np.ndarray], row: int, position: Position) -> None:
        request = position.request
        for name in _TAKEN_FROM_PARAMS:
            inputs[name][row] = getattr(request.params, name)
        inputs["top_k"][row] = min(request.params.top_k, self._vocab_size)
        inputs["seed"][row] = self.seed_words(request)
        inputs["counter"][row] = position.output_index
        inputs["slot"][row] = request.slot
        for place, (token, value) in enumerate(_biases(position)):
            inputs["bias_ids"][row, place] = token
            inputs["bias_values"][row, place] = value

    def seed_words(self, request: Request) -> np.ndarray:
        """64 bits: of the request's own seed, else of the engine's seed and the request's id."""
        own = request.params.seed
        name = f"request {own}" if own is not None else f"engine {self._seed} {request.request_id}"
        return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint32)


def _endings(request: Request) -> set[int]:
    """The tokens that would end the request."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    return {*eos, *request.params.stop_token_ids}


def check_biases(request: Request) -> None:
    """Raise when the request has more biases and banned endings than the sampler takes.

    Raises:
        RequestError: of that.
    """
    params = request.params
    endings = _endings(request) if params.min_tokens else set()
    if len(params.logit_bias) + len(endings) > _BIAS_WIDTH:
        raise RequestError(
            f"min_tokens bans every ending, and logit_bias and endings are at most {_BIAS_WIDTH} "
            "tokens together",
            param="min_tokens",
            logit_bias=len(params.logit_bias),
            endings=len(endings),
        )


def _biases(position: Position) -> list[tuple[int, float]]:
    """The request's logit biases; before ``min_tokens`` the tokens that would end it are banned."""
    request, params = position.request, position.request.params
    biases = list(params.logit_bias)
    if position.output_index < params.min_tokens:
        endings = _endings(request)
        biases = [pair for pair in biases if pair[0] not in endings]
        biases += [(token, -np.inf) for token in sorted(endings)]
    return biases


def _sample_padded(
    logits: Array,
    inputs: SamplingInputs,
    state: SamplingState,
    *,
    form: SamplingForm,
    max_rows: int,
) -> tuple[Array, SampleResult, SamplingState]:
    """``sample``, and its tokens padded to the length that steps take."""
    result, state = sample(
        logits,
        inputs,
        state,
        with_filters=form.with_filters,
        with_logprobs=form.with_logprobs,
    )
    return jnp.pad(result.tokens, (0, max_rows - logits.shape[0])), result, state
