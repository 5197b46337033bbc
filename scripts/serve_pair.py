"""Two engines of one process as two servers: a P/D pair where no transfer library is installed.

usage: serve_pair.py ARGUMENTS_OF_SERVE --and ARGUMENTS_OF_SERVE, each with the connector
InProcessConnector. One signal ends both.
"""

import asyncio
import contextlib
import sys
from typing import Any

import click

from dcpjax.cli.commands import serve_command
from dcpjax.config import EngineConfig
from dcpjax.llm import load_engine
from dcpjax.mesh import find_devices
from dcpjax.server import run

SEPARATOR = "--and"


def main() -> None:
    arguments = sys.argv[1:]
    middle = arguments.index(SEPARATOR)
    settings = [parse(arguments[:middle]), parse(arguments[middle + 1 :])]
    configs = [EngineConfig.from_settings(item.pop("model"), engine(item)) for item in settings]
    find_devices(max(config.tensor_parallel_size for config in configs), "cpu")
    asyncio.run(serve_all(configs, settings))


def parse(arguments: list[str]) -> dict[str, Any]:
    return serve_command.make_context("serve", list(arguments)).params


def engine(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of the engine alone."""
    server = {parameter.name for parameter in serve_command.params if is_of_server(parameter)}
    return {name: value for name, value in settings.items() if name not in server}


def is_of_server(parameter: click.Parameter) -> bool:
    return getattr(parameter, "section", None) == "Server"


async def serve_all(configs: list[EngineConfig], settings: list[dict[str, Any]]) -> None:
    with contextlib.ExitStack() as stack:
        servers = []
        for config, item in zip(configs, settings, strict=True):
            server = run.ServerConfig(
                host=item["host"], port=item["port"], model_names=(config.model,)
            )
            bound = stack.enter_context(run.bind(server))
            engine, tokenizer = load_engine(config, report)
            servers.append(
                run.serve(
                    engine,
                    tokenizer,
                    server,
                    bound,
                    max_num_seqs=config.max_num_seqs,
                    on_ready=lambda _, bound=bound: print(f"ready: {run.url_of(bound)}"),
                )
            )
        await asyncio.gather(*servers)


def report(what: str, done: int, total: int) -> None:
    print(f"{what} ({done}/{total})", flush=True)


if __name__ == "__main__":
    main()
