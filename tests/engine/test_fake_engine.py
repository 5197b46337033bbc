"""The fake engine of the tests of text and server ends requests as the real scheduler does."""

from typing import Any

import pytest

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.request import Request, SamplingParams, TokenOutput
from dcpjax.engine.scheduler import Drain, Scheduler, StepShapes
from tests.fakes import EOS, VOCAB_SIZE, CountUpEngine

MAX_MODEL_LEN = 32


class CountUpScheduler:
    """The real scheduler over a device that counts up, with its look-ahead of one step."""

    def __init__(self) -> None:
        self._scheduler = Scheduler(
            PagePool(64, 4),
            max_num_seqs=4,
            max_model_len=MAX_MODEL_LEN,
            shapes=StepShapes(decode_rows=(1, 4), prefill=((1, 8), (4, 8))),
            enable_prefix_caching=False,
        )
        self._in_flight: Any = None
        self.add = self._scheduler.add
        self.abort = self._scheduler.abort

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[TokenOutput]:
        plan = self._scheduler.schedule()
        before, self._in_flight = self._in_flight, None if isinstance(plan, Drain) else plan
        if before is None:
            return self._scheduler.take_ended()
        tokens = [[(segment.request.token_ids[-1] + 1) % VOCAB_SIZE] for segment in before.sampling]
        return self._scheduler.commit(before, tokens)


ENGINES = [CountUpScheduler, lambda: CountUpEngine(max_model_len=MAX_MODEL_LEN)]
CASES: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 5},
    {"max_tokens": None},
    {"max_tokens": 20, "stop_token_ids": (255,)},
    {"max_tokens": 20, "stop_token_ids": (255,), "min_tokens": 5},
    {"max_tokens": 20, "stop_token_ids": (255,), "min_tokens": 6},
    {"max_tokens": 20, "stop_token_ids": (255,), "min_tokens": 7},
    {"max_tokens": 20, "stop_token_ids": (EOS,)},
    {"max_tokens": 20, "stop_token_ids": (EOS,), "ignore_eos": True},
    {"max_tokens": 20, "min_tokens": 7},
    {"max_tokens": 20, "min_tokens": 8},
    {"max_tokens": 7},  # the last one is the end of sequence as well
    {"max_tokens": 6, "stop_token_ids": (255,)},
    {"max_tokens": 10, "ignore_eos": True},
]


def run(engine: Any, params: list[dict[str, Any]], *, abort_after: int | None = None) -> Any:
    """Tokens and ending of each request; the first one is aborted after so many steps."""
    found: dict[str, list[Any]] = {str(number): [[], None, None] for number in range(len(params))}
    for number, settings in enumerate(params):
        prompt = tuple(range(240, 250))  # six more tokens are 255, seven are EOS
        engine.add(Request(str(number), prompt, SamplingParams(**settings), frozenset({EOS})))
    steps = 0
    while engine.has_work:
        if steps == abort_after:
            engine.abort("0")
        for output in engine.step():
            assert found[output.request_id][1] is None, "an output after the last one"
            found[output.request_id][0] += output.token_ids
            found[output.request_id][1:] = [output.finish_reason, output.stop_token_id]
        steps += 1
    return found


@pytest.mark.parametrize("params", CASES, ids=str)
def test_one_request_ends_alike(params: dict[str, Any]) -> None:
    real, fake = (run(make(), [params]) for make in ENGINES)
    assert real == fake
    assert real["0"][1] is not None


def test_many_requests_end_alike() -> None:
    real, fake = (run(make(), CASES) for make in ENGINES)
    assert real == fake


def test_the_cases_end_in_every_way() -> None:
    """End of sequence, a stop id, a length; and the fake can be wrong."""
    endings = {
        (reason.value, stop)
        for params in CASES
        for _, reason, stop in run(CountUpEngine(max_model_len=MAX_MODEL_LEN), [params]).values()
    }
    assert endings == {("stop", None), ("stop", 255), ("stop", EOS), ("length", None)}


@pytest.mark.parametrize("make", ENGINES)
def test_an_abort_is_work_until_its_output_was_taken(make: Any) -> None:
    engine = make()
    (ended,) = run(engine, [{"max_tokens": 5}], abort_after=0).values()
    assert ended[0] == [] and ended[1].value == "abort"
    assert not engine.has_work
    engine.abort("0")
    assert not engine.has_work
