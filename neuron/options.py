"""Command-line options that name an engine, for programs that are made for one."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from dcpjax.cli.options import JsonObject, option
from dcpjax.config import EngineConfig, KVTransferConfig
from neuron.targets import TARGETS

COMMAND = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command of this package, as click takes them."""

Function = TypeVar("Function", bound=Callable[..., Any])

_FIELDS = {item.name: item for item in dataclasses.fields(EngineConfig)}
_SPELLINGS: dict[str, tuple[str, ...]] = {
    # field of EngineConfig: short spellings beside the one of dcpjax serve
    "tensor_parallel_size": ("--tp", "-tp"),
    "decode_context_parallel_size": ("--dcp", "-dcp"),
    "cp_kv_cache_interleave_size": ("--interleave",),
    "block_size": (),
    "max_model_len": (),
    "max_num_seqs": (),
    "max_num_batched_tokens": (),
    "num_pages": (),
    "dtype": (),
    "kv_cache_dtype": (),
    "prefill_gather": (),
    "index_kv": (),
    "step_form": (),
    "speculative_config": (),
}
ENGINE_FIELDS = tuple(_SPELLINGS)
"""The fields of EngineConfig that decide about its programs."""


def engine_options(function: Function) -> Function:
    """Add the settings of an engine that decide about its programs, named as its fields."""
    function = option(
        "Engine",
        "--apply-prefill-dcp",
        is_flag=True,
        help="a prefill engine that sends its KV, with the ranks in Neuron's order for it",
    )(function)
    for name in reversed(_SPELLINGS):
        function = _engine_option(name)(function)
    return function


def machine_options(function: Function) -> Function:
    """Add --target and --lnc."""
    function = option(
        "Machine",
        "--lnc",
        default=2,
        help="physical cores of a logical one, NEURON_LOGICAL_NC_CONFIG where the programs run",
    )(function)
    return option(
        "Machine", "--target", type=click.Choice(list(TARGETS)), default="trn2", help="chip"
    )(function)


class OperatorList(click.ParamType):
    """A file with what ``neuronx-cc list-operators`` has printed: a set of HLO's opcodes."""

    name = "file"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> frozenset[str]:
        try:
            text = Path(value).read_text()
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"cannot be read: {error}", param, ctx)
        opcodes = frozenset(word.lower().replace("_", "-") for word in text.split())
        if not opcodes:
            self.fail(f"{value} is empty, and a list has one opcode a line", param, ctx)
        return opcodes


def program_options(function: Function) -> Function:
    """Add the model, and what is asked about its programs."""
    function = option(
        "Programs",
        "--operators",
        type=OperatorList(),
        help="what neuronx-cc list-operators has printed: no program has others",
    )(function)
    function = option(
        "Programs",
        "--draft-tokens",
        default=4,
        help="tokens of a segment that is verified, as in speculation",
    )(function)
    return click.argument("model")(function)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The engine of these options; those that are none of an engine's are left out."""
    settings = {name: options[name] for name in ENGINE_FIELDS}
    if options["apply_prefill_dcp"]:
        settings["apply_prefill_dcp"] = True
        settings["kv_transfer_config"] = KVTransferConfig("kv_producer", "NeuronNixlConnector")
    return EngineConfig.from_settings(options["model"], settings)


def _engine_option(name: str) -> Callable[[Function], Function]:
    item = _FIELDS[name]
    return option(
        "Engine",
        "--" + name.replace("_", "-"),
        *_SPELLINGS[name],
        name,
        type=_option_type(get_args(item.type)),
        default=item.default,
        help=item.metadata["help"],
    )


def _option_type(kinds: tuple[Any, ...]) -> Any:
    """Of a field that has one of these: words, integers alone, or an object."""
    if words := [kind for kind in kinds if isinstance(kind, str)]:
        return click.Choice(words)
    return JsonObject() if any(map(dataclasses.is_dataclass, kinds)) else int
