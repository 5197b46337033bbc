"""The processes of one engine find each other, before anything is compiled.

The leader hears of all others what has to be equal, and every process gets the same answer: where
JAX's processes meet, or why they make no engine.
"""

import dataclasses
import hashlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dcpjax.config import DistributedConfig, EngineConfig, Progress
from dcpjax.engine.link import Link
from dcpjax.engine.link_messages import Hello, Refused, Welcome
from dcpjax.errors import ConfigError
from dcpjax.models.checkpoint import Checkpoint, fingerprint

JOIN_SECONDS = 600.0
"""For so long a process waits for the others; they may have to bring the model first."""
_NOT_SET = "not set"
_PACKAGE = Path(__file__).resolve().parent.parent
_OWN_SETTINGS = ("model", "node_rank", "skip_tokenizer_init")
"""Those that may differ; what the model is follows from its weights."""


def facts_of(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """What has to be equal on all processes, as texts by name."""
    settings = {
        item.name: _as_written(getattr(config, item.name))
        for item in dataclasses.fields(config)
        if item.name not in _OWN_SETTINGS
    }
    shapes = hashlib.sha256(repr(sorted(checkpoint.shapes.items())).encode()).hexdigest()
    weights = f"{fingerprint(checkpoint)[:16]} {shapes[:8]}"
    return {**settings, "weights": weights, "code": _code(), "jax": jax.__version__}


def _as_written(value: Any) -> str:
    """A setting as a user writes it: objects as JSON, without what they left out."""
    if value is None:
        return _NOT_SET
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = dataclasses.fields(value)
    settings = {item.name: (getattr(value, item.name), item.default) for item in fields}
    return json.dumps({name: one for name, (one, default) in settings.items() if one != default})


def _code() -> str:
    """What stands for the source of this package."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def join(
    link: Link,
    config: DistributedConfig,
    facts: dict[str, str],
    progress: Progress | None = None,
) -> str:
    """Meet the other processes; the address where JAX's processes meet.

    Args:
        progress: hears what is waited for, and how many processes are known to be there.

    Raises:
        ConfigError: they do not make an engine, or do not come; the same on all that came.
        EngineDeadError: one of them is gone.
    """

    def tell(came: int) -> None:
        if progress is not None:
            what = f"wait for {config.nnodes} processes at {_meeting_point(config)}"
            progress(f"{what}, up to {JOIN_SECONDS:.0f} s", came, config.nnodes)

    tell(1)
    if not config.is_leader:
        return _follow(link, config, facts)
    return _lead(link, config, facts, tell)


def _lead(
    link: Link, config: DistributedConfig, facts: dict[str, str], tell: Callable[[int], None]
) -> str:
    hellos, refusal = _gather(link, config, tell)
    by_rank = {hello.node_rank: hello.facts for hello in hellos.values()}
    refusal = refusal or _wrong_ranks(hellos, config) or _differences({0: facts, **by_rank})
    if refusal is not None:
        link.send(refusal)
        raise _error(refusal)
    port = _free_port(config.master_addr)
    coordinator = _meeting_point(dataclasses.replace(config, master_port=port))
    link.send(Welcome(coordinator))
    return coordinator


def _meeting_point(config: DistributedConfig) -> str:
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    return f"{host}:{config.master_port}"


def _gather(
    link: Link, config: DistributedConfig, tell: Callable[[int], None]
) -> tuple[dict[bytes, Hello], Refused | None]:
    """What the others say, or as many of them as come in time."""
    hellos: dict[bytes, Hello] = {}
    stop = time.monotonic() + JOIN_SECONDS
    while len(hellos) < config.nnodes - 1:
        try:
            identity, message = link.receive_from(stop - time.monotonic())
        except TimeoutError:
            return hellos, _too_few(hellos, config)
        if isinstance(message, Hello):
            link.name(identity, message.node_rank)
            hellos[identity] = message
            tell(1 + len(hellos))
    return hellos, None


def _too_few(hellos: dict[bytes, Hello], config: DistributedConfig) -> Refused:
    came = [0, *sorted(hello.node_rank for hello in hellos.values())]
    rule = f"all {config.nnodes} processes of an engine come within {JOIN_SECONDS:.0f} s"
    return Refused(rule, {"address": _meeting_point(config), "came": str(came)})


def _wrong_ranks(hellos: dict[bytes, Hello], config: DistributedConfig) -> Refused | None:
    found = sorted(hello.node_rank for hello in hellos.values())
    if found == list(range(1, config.nnodes)):
        return None
    values = {"nnodes": str(config.nnodes), "node_ranks": str([0, *found])}
    return Refused("each process of an engine has a node_rank of its own, in [0, nnodes)", values)


def _differences(by_rank: dict[int, dict[str, str]]) -> Refused | None:
    """What is not equal on all processes, with the values of each, as their users wrote them."""
    names = sorted({name for facts in by_rank.values() for name in facts})
    different = [
        f"{name} is {_by_node({rank: facts.get(name) for rank, facts in by_rank.items()})}"
        for name in names
        if len({facts.get(name) for facts in by_rank.values()}) > 1
    ]
    rule = "all processes of an engine have the same settings, weights, code and JAX"
    return Refused("; ".join([rule, *different]), {}) if different else None


def _by_node(values: dict[int, str | None]) -> str:
    return ", ".join(
        f"{value or _NOT_SET} on node {rank}" for rank, value in sorted(values.items())
    )


def _follow(link: Link, config: DistributedConfig, facts: dict[str, str]) -> str:
    link.send(Hello(config.node_rank, facts))
    try:
        _, message = link.receive_from(JOIN_SECONDS)
    except TimeoutError:
        raise ConfigError(
            f"the process with node rank 0 answers within {JOIN_SECONDS:.0f} s: it listens there, "
            "and all processes come",
            address=_meeting_point(config),
            nnodes=config.nnodes,
        ) from None
    if isinstance(message, Refused):
        raise _error(message)
    assert isinstance(message, Welcome), "a leader answers with Welcome or Refused"
    return message.coordinator


def _error(refusal: Refused) -> ConfigError:
    return ConfigError(refusal.rule, **refusal.values)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
