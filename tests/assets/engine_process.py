"""One process of an engine of several, for tests: says on stdout, in JSON lines, how it fares.

usage: engine_process.py SPEC, a JSON object:
  model, settings   of the engine; node rank 0 leads
  calls             of the leader: lists of [prompt, sampling parameters], each list one call
  repeats           the leader makes its last call again and again, until something happens
  raises_at         number of the step that fails in this process
  warm_up           "waits" for ever, or "raises", instead of compiling
"""

import json
import sys
import threading
from typing import Any

from dcpjax import LLM, SamplingParams
from dcpjax.config import EngineConfig
from dcpjax.engine.runner import Runner
from dcpjax.errors import DcpjaxError
from dcpjax.llm import load_follower

SPEC: dict[str, Any] = json.loads(sys.argv[1])


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def break_at(step: int) -> None:
    """Let a step fail that is not one of the warm-up."""
    execute, numbers = Runner.execute, iter(range(10**9))

    def broken(self: Runner, order: Any) -> Any:
        if order.outputs and next(numbers) == step:
            raise ZeroDivisionError("as the test wants it")
        return execute(self, order)

    Runner.execute = broken


def break_warm_up(how: str) -> None:
    def broken(self: Runner, progress: Any = None) -> None:
        say(warming=True)
        if how == "raises":
            raise ZeroDivisionError("as the test wants it")
        threading.Event().wait()

    Runner.warm_up = broken


def lead() -> None:
    with LLM(SPEC["model"], skip_tokenizer_init=True, **SPEC["settings"]) as llm:
        say(ready=True)
        calls, tokens = SPEC["calls"], []
        while calls:
            prompts, params = zip(*calls[0], strict=True)
            outputs = llm.generate(list(prompts), [SamplingParams(**one) for one in params])
            tokens.append([output.outputs[0].token_ids for output in outputs])
            calls = calls[1:] or (calls if SPEC.get("repeats") else [])
            if SPEC.get("repeats"):
                say(served=len(tokens), tokens=tokens[-1])
        names = ("compilations_after_warmup", "num_pages", "num_processes", "acceptance_length")
        say(tokens=tokens, stats={name: llm.stats()[name] for name in names})


def follow() -> None:
    config = EngineConfig.from_settings(SPEC["model"], SPEC["settings"])
    run = load_follower(config)
    say(ready=True)
    run()


if "raises_at" in SPEC:
    break_at(SPEC["raises_at"])
if "warm_up" in SPEC:
    break_warm_up(SPEC["warm_up"])
try:
    follow() if SPEC["settings"].get("node_rank") else lead()
except DcpjaxError as error:
    say(error=type(error).__name__, message=str(error))
    sys.exit(1)
