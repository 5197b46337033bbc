"""Options from the fields of ``EngineConfig``, grouped under headings of ``--help``."""

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from dcpjax.config import EngineConfig
from dcpjax.errors import DcpjaxError, EngineDeadError

Function = TypeVar("Function", bound=Callable[..., Any])

_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Parallelism": (
        "tensor_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "prefill_kv",
        "cp_kv_cache_interleave_size",
        "dcp_comm_backend",
        "prefill_gather",
        "device",
        "step_form",
    ),
    "KV cache and batching": (
        "block_size",
        "num_pages",
        "kv_cache_dtype",
        "index_kv",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
    ),
    "Several processes": ("nnodes", "node_rank", "master_addr", "master_port"),
    "Speculation": ("speculative_config",),
    "KV transfer": ("kv_transfer_config", "apply_prefill_dcp"),
}
_OTHER_SECTION = "Model"


class WrongSettings(click.ClickException):
    """Something that the user can put right; no traceback."""

    exit_code = 2


class JsonObject(click.ParamType):
    """A JSON object on the command line."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, Any]:
        try:
            parsed = json.loads(value)
        except ValueError as error:
            self.fail(f"is not valid JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"is a JSON object, not {value[:100]!r}", param, ctx)
        return parsed


class SectionOption(click.Option):
    """An option that is listed under a heading of ``--help``."""

    def __init__(self, *args: Any, section: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionCommand(click.Command):
    """A command whose ``--help`` groups the options, and whose errors have no traceback.

    Exit code 2: something to put right before it can start. 1: the engine failed while it served.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                sections.setdefault(getattr(option, "section", "Other"), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EngineDeadError as error:
            raise click.ClickException(str(error)) from error
        except DcpjaxError as error:
            raise WrongSettings(str(error)) from error


def option(section: str, *flags: str, **kwargs: Any) -> Callable[[Function], Function]:
    """``click.option`` under a heading, with its default shown."""
    kwargs.setdefault("show_default", True)
    return click.option(*flags, cls=SectionOption, section=section, **kwargs)


def engine_options(function: Function) -> Function:
    """Add one option for each field of EngineConfig."""
    for item in reversed(dataclasses.fields(EngineConfig)):
        if not item.metadata.get("argument"):
            function = _field_option(item)(function)
    function = option(
        "KV transfer",
        "--additional-config",
        type=JsonObject(),
        help="further settings as a JSON object, e.g. '{\"apply_prefill_dcp\": true}'",
    )(function)
    return click.argument("model")(function)


def _field_option(item: "dataclasses.Field[Any]") -> Callable[[Function], Function]:
    spelling = "--" + item.name.replace("_", "-")
    if item.type is bool:
        spelling += "/--no-" + item.name.replace("_", "-")
    section = next((s for s, names in _SECTIONS.items() if item.name in names), _OTHER_SECTION)
    return option(
        section,
        spelling,
        *item.metadata["flags"],
        item.name,
        type=_option_type(item.type),
        default=item.default,
        show_default=item.default is not None,
        help=item.metadata["help"],
    )


def _option_type(annotation: Any) -> Any:
    """The click type of a field: choices for a Literal, and None only by leaving the option out."""
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not types.NoneType)
    return JsonObject() if dataclasses.is_dataclass(annotation) else annotation
