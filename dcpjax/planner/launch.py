"""A planned cluster as commands of this version of dcpjax, checked by its own settings."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.cache.widths import FP8_DS_MLA
from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError
from dcpjax.planner.candidates import Candidate
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.evaluate import Setting
from dcpjax.planner.memory import capacity, deployment_parts
from dcpjax.planner.models import ModelShape
from dcpjax.transfer.parts import cuts_pages

PREFILL_PORT, DECODE_PORT, SIDE_PORT, ROUTER_PORT = 8100, 8200, 5600, 8000


@dataclass(frozen=True)
class Launch:
    """Commands, one a process, the router last; ``notes`` say what they leave out of the plan."""

    commands: tuple[str, ...]
    notes: tuple[str, ...]


def launch(setting: Setting, candidate: Candidate, argument: str) -> Launch | None:
    """The commands of a cluster; None where this version does not serve it."""
    model, prefill = setting.model, candidate.prefill
    if prefill is not None and (
        _cuts_keys(model, prefill, candidate.decode) or not _has_room(setting, prefill)
    ):
        return None
    commands: list[str] = []
    notes: list[str] = []
    roles: list[tuple[Deployment, int, str | None, int]] = [
        (candidate.decode, candidate.num_decode, None, DECODE_PORT)
    ]
    if prefill is not None:
        roles = [
            (prefill, candidate.num_prefill, "kv_producer", PREFILL_PORT),
            (candidate.decode, candidate.num_decode, "kv_consumer", DECODE_PORT),
        ]
    for number, (deployment, count, role, port) in enumerate(roles):
        settings = _settings(setting, deployment, role, SIDE_PORT + 100 * number)
        if settings is None:
            return None
        notes += _left_out(settings, deployment, model)
        ports = range(port, port + count)
        commands += [serve_command(argument, settings, port) for port in ports]
    if prefill is not None:
        commands.append(_router_command(candidate))
    elif candidate.num_decode > 1:
        notes.append("a load balancer before the engines spreads requests over them")
    return Launch(tuple(commands), tuple(dict.fromkeys(notes)))


def _cuts_keys(model: ModelShape, source: Deployment, target: Deployment) -> bool:
    """Whether pages of scaled indexer keys, which move as a whole, are not the target's pages."""
    if source.stored_dtype(model) != FP8_DS_MLA:
        return False
    keys = [part for part in deployment_parts(model, source) if part.name.endswith("indexer")]
    return any(
        cuts_pages(source.part_placement(part, model), target.part_placement(part, model))
        for part in keys
    )


def _has_room(setting: Setting, deployment: Deployment) -> bool:
    """Whether the context fits beside the weights as engines spread them: experts over the ranks of
    one engine."""
    context, ranks = setting.demand.context, deployment.tp * deployment.pcp
    room = capacity(setting.model, setting.device, deployment, context=context, expert_ranks=ranks)
    return not room.missing_bytes(context)


def _settings(
    setting: Setting, deployment: Deployment, role: str | None, side_port: int
) -> dict[str, Any] | None:
    """Settings that our engine takes: those of the plan, or with 8-bit values as it has them."""
    model, context = setting.model, setting.demand.context
    known = {item.name for item in dataclasses.fields(EngineConfig)}
    for dtype in (None, "fp8"):
        settings = {
            **deployment.engine_settings(model),
            "max_model_len": context,
            "max_num_batched_tokens": 8192,
        }
        if dtype and "kv_cache_dtype" in settings:
            settings["kv_cache_dtype"] = dtype
        if role is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_port": side_port,
            }
        if deployment.draft_tokens and "speculative_config" in known:
            settings["speculative_config"] = {
                "method": "mtp",
                "num_speculative_tokens": deployment.draft_tokens,
            }
        if _is_accepted(model.name, settings):
            return settings
    return None


def _is_accepted(model: str, settings: Mapping[str, Any]) -> bool:
    try:
        EngineConfig.from_settings(model, dict(settings))
    except ConfigError:
        return False
    return True


def _left_out(settings: Mapping[str, Any], deployment: Deployment, model: ModelShape) -> list[str]:
    notes: list[str] = []
    if deployment.draft_tokens and "speculative_config" not in settings:
        notes.append("this version serves no drafts: expect the times without speculation")
    planned = deployment.stored_dtype(model)
    if settings.get("kv_cache_dtype", planned) != planned:
        notes.append(f"the cache is {settings['kv_cache_dtype']}: {planned} is not served yet")
    return notes


def serve_command(argument: str, settings: Mapping[str, Any], port: int) -> str:
    """``dcpjax serve`` with these settings, as a shell takes it."""
    words = ["dcpjax", "serve", argument, "--port", str(port)]
    for name, value in settings.items():
        if value == 1 and name.endswith("parallel_size"):
            continue
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        words += ["--" + name.replace("_", "-"), text]
    return shlex.join(words)


def _router_command(candidate: Candidate) -> str:
    words = ["dcpjax", "router", "--port", str(ROUTER_PORT)]
    for flag, port, count in (
        ("--prefill", PREFILL_PORT, candidate.num_prefill),
        ("--decode", DECODE_PORT, candidate.num_decode),
    ):
        for number in range(count):
            words += [flag, f"http://127.0.0.1:{port + number}"]
    return shlex.join(words)
