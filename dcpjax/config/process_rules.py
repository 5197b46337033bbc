"""What an engine of several processes asks of its other settings."""

from typing import TYPE_CHECKING, Any

from dcpjax.errors import UnsupportedCombination

if TYPE_CHECKING:
    from dcpjax.config.engine import EngineConfig


def check_processes(config: "EngineConfig") -> None:
    """Refuse what does not go with several processes; the same on all of them.

    Raises:
        UnsupportedCombination: names nnodes and the other setting.
    """
    for is_refused, rule, values in _rules(config):
        if is_refused:
            raise UnsupportedCombination(rule, nnodes=config.nnodes, **values)


def _rules(config: "EngineConfig") -> list[tuple[bool, str, dict[str, Any]]]:
    """Whether a rule is broken, the rule, and the values that break it."""
    transfer = config.kv_transfer_config
    role = None if transfer is None else transfer.kv_role
    connector = None if transfer is None else transfer.kv_connector
    return [
        (
            role not in (None, "kv_producer"),
            "an engine of several processes (nnodes) computes prompts for others and takes none "
            "from them: in its kv_transfer_config, kv_role is 'kv_producer'",
            {"kv_role": role},
        ),
        (
            transfer is not None and not transfer.is_read,
            "of an engine of several processes (nnodes) others read: in its kv_transfer_config, "
            "kv_connector is 'NixlConnector'",
            {"kv_connector": connector},
        ),
        (
            config.step_form not in ("auto", "dynamic"),
            "steps of several processes (nnodes) have step_form 'dynamic'",
            {"step_form": config.step_form},
        ),
        (
            config.device == "neuron",
            "an engine on device 'neuron' is one process: nnodes is 1",
            {"device": config.device},
        ),
    ]
