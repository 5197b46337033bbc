"""Two engines of one process as a prefill/decode pair, driven in turn like two servers."""

import contextlib
import importlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dcpjax.engine.engine import Engine
from dcpjax.engine.request import FinishReason, Request
from dcpjax.models.checkpoint import Checkpoint
from tests.engine.serving import Served, engine_of, request_of

BRIEF: dict[str, Any] = {
    "kv_lease_duration": 1.5,
    "kv_lease_extension": 1.0,
    "heartbeat_interval": 0.2,
}
"""Leases for tests that let one run out."""
MODULES = {
    "InProcessConnector": (),
    "NixlConnector": ("nixl_cu12", "nixl_cu13", "nixl"),
    "MooncakeConnector": ("mooncake.engine",),
}
PATIENCE = 60.0  # seconds until a test that waits for the other side gives up

_names = itertools.count()


def skip_without(connector: str) -> None:
    """A transfer library may be missing, or miss a library of the system itself."""
    for module in MODULES[connector]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            return
    if MODULES[connector]:
        pytest.skip(f"none of {MODULES[connector]} can be imported")


def transfer(role: str, connector: str = "InProcessConnector", **changes: Any) -> dict[str, Any]:
    """Settings of an engine that takes part in transfers."""
    config = {"kv_role": role, "kv_connector": connector, "heartbeat_interval": 0.2, **changes}
    return {"kv_transfer_config": config}


@dataclass
class Node:
    """An engine, and what has come out of it."""

    engine: Engine
    served: dict[str, Served] = field(default_factory=lambda: defaultdict(Served))
    errors: dict[str, str] = field(default_factory=dict)
    offers: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def step(self) -> None:
        for output in self.engine.step():
            self.served[output.request_id].add(output)
            if output.error is not None:
                self.errors[output.request_id] = output.error
            if output.kv_transfer_params is not None:
                self.offers[output.request_id] = output.kv_transfer_params
        self.engine.check_integrity()
        if self.engine.is_blocked:
            time.sleep(0.001)

    def run(self, *request_ids: str) -> None:
        """Step until these requests have ended."""
        deadline = time.monotonic() + PATIENCE
        while any(self.served[name].finish_reason is None for name in request_ids):
            assert time.monotonic() < deadline, f"{request_ids} do not end"
            self.step()

    def drain(self) -> None:
        """Step until nobody holds pages any more."""
        deadline = time.monotonic() + PATIENCE
        while self.engine.has_work or self.engine.stats()["kv_transfer"]["num_leases"]:
            assert time.monotonic() < deadline, "pages are held and nobody gives them up"
            self.step()
        self.step()
        assert self.engine.stats()["kv_cache_usage"] == 0


@contextmanager
def node(checkpoint: Checkpoint, **settings: Any) -> Iterator[Node]:
    engine = engine_of(checkpoint, **settings)
    try:
        yield Node(engine)
    finally:
        engine.close()


def ask_prefill(prefill: Node, prompt, name: str | None = None) -> Mapping[str, Any]:
    """Have a prompt computed for another engine; returns what that one needs."""
    name = name or f"prefill {next(_names)}"
    request = request_of(name, prompt, max_tokens=1)
    request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    prefill.engine.add(request)
    prefill.run(name)
    assert prefill.served[name].finish_reason is FinishReason.LENGTH
    return prefill.offers[name]


def begin_prefill(prefill: Node, prompt) -> Mapping[str, Any]:
    """Have a prompt computed for another engine; returns when it is offered, early if possible."""
    name = f"prefill {next(_names)}"
    request = request_of(name, prompt, max_tokens=1)
    request.kv_transfer_params = {"do_remote_decode": True, "early_offer": True}
    prefill.engine.add(request)
    while name not in prefill.offers:
        prefill.step()
    return prefill.offers[name]


def decode_request(prompt, offer: Mapping[str, Any], **params: Any) -> Request:
    request = request_of(f"decode {next(_names)}", prompt, **params)
    request.kv_transfer_params = dict(offer)
    return request


def hand_over(prefill: Node, decode: Node, prompt, **params: Any) -> Served:
    """A prompt through both engines, as a router does it."""
    request = decode_request(prompt, ask_prefill(prefill, prompt), **params)
    decode.engine.add(request)
    decode.run(request.request_id)
    return decode.served[request.request_id]
