"""A planned cluster as commands of this version of dcpjax, checked by its own settings."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.config import EngineConfig
from dcpjax.errors import UnsupportedCombination
from dcpjax.planner.candidates import Candidate
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.evaluate import CHUNK, Setting

ROUTER_PORT, FIRST_PORT, FIRST_SIDE_PORT = 8000, 8100, 5600
"""Engine n of a cluster listens on ``FIRST_PORT + n``, its side channel on ``FIRST_SIDE_PORT + n``.
"""
MOST_ENGINES = ROUTER_PORT - FIRST_SIDE_PORT
"""With more, side channels would reach the router's port."""

_SPREAD = "a load balancer before the engines spreads requests over them"
_ONE_HOST = (
    "the addresses are those of one host, on which each engine has to see devices of its own "
    "(CUDA_VISIBLE_DEVICES, NEURON_RT_VISIBLE_CORES)"
)
_OTHER_HOSTS = "engines of other hosts take --host and kv_ip, and the router their URLs"


@dataclass(frozen=True)
class Launch:
    """Commands, one a process, the router last; ``notes`` say what there is to do beside them."""

    commands: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Engine:
    """One process: its place among all engines of the cluster, and what it is for."""

    number: int
    deployment: Deployment
    role: str | None

    @property
    def port(self) -> int:
        return FIRST_PORT + self.number

    @property
    def side_port(self) -> int:
        return FIRST_SIDE_PORT + self.number


def launch(setting: Setting, candidate: Candidate, argument: str) -> Launch:
    """The commands of a cluster; ``argument`` is their MODEL.

    Raises:
        ConfigError: this version does not serve the cluster, and why.
    """
    _check_served(candidate)
    engines = _engines(candidate)
    commands = [
        serve_command(argument, _checked_settings(setting, engine, argument), engine.port)
        for engine in engines
    ]
    if candidate.prefill is not None:
        commands.append(_router_command(engines))
    return Launch(tuple(commands), _notes(setting, candidate))


def _check_served(candidate: Candidate) -> None:
    for deployment in (candidate.prefill, candidate.decode):
        if deployment is not None and deployment.dp > 1:
            raise UnsupportedCombination(
                "an engine has one copy of the attention: several are several engines",
                engine=deployment.label(),
                dp=deployment.dp,
            )
    if candidate.num_prefill + candidate.num_decode > MOST_ENGINES:
        raise UnsupportedCombination(
            f"the commands have ports for at most {MOST_ENGINES} engines",
            num_prefill=candidate.num_prefill,
            num_decode=candidate.num_decode,
        )


def _engines(candidate: Candidate) -> list[_Engine]:
    """All engines of a cluster, those that compute prompts first."""
    if candidate.prefill is None:
        return [_Engine(number, candidate.decode, None) for number in range(candidate.num_decode)]
    sources = [candidate.prefill] * candidate.num_prefill
    first = len(sources)
    return [
        *(_Engine(number, source, "kv_producer") for number, source in enumerate(sources)),
        *(
            _Engine(number, candidate.decode, "kv_consumer")
            for number in range(first, first + candidate.num_decode)
        ),
    ]


def _checked_settings(setting: Setting, engine: _Engine, argument: str) -> dict[str, Any]:
    """The settings of an engine, which our own rules have accepted."""
    deployment = engine.deployment
    settings: dict[str, Any] = {
        **deployment.engine_settings(setting.model),
        "max_model_len": setting.demand.context,
        "max_num_batched_tokens": CHUNK,
    }
    if engine.role is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": engine.role,
            "kv_port": engine.side_port,
        }
    if deployment.draft_tokens:
        settings["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": deployment.draft_tokens,
        }
    EngineConfig.from_settings(argument, settings)
    return settings


def _notes(setting: Setting, candidate: Candidate) -> tuple[str, ...]:
    notes: list[str] = []
    if candidate.num_prefill + candidate.num_decode > 1:
        notes.append(_ONE_HOST)
    if candidate.num_devices > setting.device.node:
        notes.append(_OTHER_HOSTS)
    if candidate.prefill is None and candidate.num_decode > 1:
        notes.append(_SPREAD)
    return tuple(notes)


def serve_command(argument: str, settings: Mapping[str, Any], port: int) -> str:
    """``dcpjax serve`` with these settings, as a shell takes it."""
    words = ["dcpjax", "serve", argument, "--port", str(port)]
    for name, value in settings.items():
        if value == 1 and name.endswith("parallel_size"):
            continue
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        words += ["--" + name.replace("_", "-"), text]
    return shlex.join(words)


def _router_command(engines: list[_Engine]) -> str:
    words = ["dcpjax", "router", "--port", str(ROUTER_PORT)]
    for engine in engines:
        flag = "--prefill" if engine.role == "kv_producer" else "--decode"
        words += [flag, f"http://127.0.0.1:{engine.port}"]
    return shlex.join(words)
