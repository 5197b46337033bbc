"""An engine on Neuron looks at its environment before it loads anything."""

from types import SimpleNamespace
from typing import Any

import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine import devices as devices_module
from dcpjax.engine.engine import Engine
from dcpjax.errors import ConfigError
from dcpjax.models.checkpoint import open_checkpoint
from tests.golden.tiny import write_tiny_model

WRONG = "NEURON_RT_STOCHASTIC_ROUNDING_EN"


class _ReachedError(Exception):
    """The engine went on."""


@pytest.mark.parametrize(
    ("platform", "value", "error"),
    [("neuron", "1", ConfigError), ("neuron", "0", _ReachedError), ("cpu", "1", _ReachedError)],
)
def test_a_wrong_setting_ends_the_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, platform: str, value: str, error: Any
) -> None:
    def reached(*arguments: object) -> None:
        raise _ReachedError(WRONG)

    device = SimpleNamespace(platform=platform, device_kind="")
    monkeypatch.setattr(devices_module, "find_devices", lambda *arguments, **more: [device])
    monkeypatch.setattr(devices_module, "decode_mesh", reached)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(WRONG, value)
    folder = write_tiny_model(tmp_path / "mqa", "mqa")
    with pytest.raises(error, match=WRONG):
        Engine(EngineConfig(str(folder)), open_checkpoint(str(folder)))
