"""The commands. JAX is imported when one runs, not for ``--help``."""

import asyncio
import json
import os
import sys
import time
from typing import Any

import click

import dcpjax
from dcpjax.cli.following import follow
from dcpjax.cli.options import (
    Function,
    SectionCommand,
    WrongSettings,
    engine_options,
    option,
)
from dcpjax.cli.progress import LoadingProgress
from dcpjax.config import EngineConfig


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(dcpjax.__version__, prog_name="dcpjax")
def main() -> None:
    """Serve language models with their KV cache sharded over devices, in JAX."""


_LISTENING = (
    option("Server", "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all"),
    option("Server", "--port", default=8000, help="port to listen on; 0 for any free one"),
    option(
        "Server",
        "--api-key",
        "api_keys",
        multiple=True,
        envvar="DCPJAX_API_KEY",
        show_envvar=True,
        help="key that clients must send; may be given several times; default: none needed",
    ),
    option(
        "Server",
        "--shutdown-timeout",
        default=30.0,
        help="seconds that running requests get to finish after the first Ctrl-C",
    ),
    option(
        "Server",
        "--uvicorn-log-level",
        "log_level",
        type=click.Choice(["critical", "error", "warning", "info", "debug", "trace"]),
        default="warning",
        help="what the web server logs; info shows each request",
    ),
)


def _listening_options(function: Function) -> Function:
    """Add what every server of ours can be told."""
    for add in reversed(_LISTENING):
        function = add(function)
    return function


@main.command("serve", cls=SectionCommand)
@_listening_options
@option(
    "Server",
    "--served-model-name",
    "model_names",
    multiple=True,
    help="name that clients use, default: MODEL; may be given several times",
)
@option(
    "Server",
    "--max-queued-requests",
    default=256,
    help="sequences that may wait for their turn; more are refused with 503",
)
@engine_options
def serve_command(
    model: str,
    host: str,
    port: int,
    model_names: tuple[str, ...],
    api_keys: tuple[str, ...],
    max_queued_requests: int,
    shutdown_timeout: float,
    log_level: str,
    **settings: Any,
) -> None:
    """Serve MODEL over the OpenAI API.

    MODEL is a folder in the format of Hugging Face, a .gguf file, or a known name.

    \b
    Example: one model on four devices, each of which holds a quarter of every sequence's KV cache
        dcpjax serve ./model -tp 4 -dcp 4 --block-size 16
    """
    config = EngineConfig.from_settings(model, settings)
    if not config.distributed.is_leader:
        follow(config, shutdown_timeout)
        return
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == "InProcessConnector":
        raise WrongSettings(
            "InProcessConnector joins engines of one process, and dcpjax serve runs one: use "
            "NixlConnector or MooncakeConnector"
        )
    try:
        from dcpjax.server import run
    except ModuleNotFoundError as error:
        raise WrongSettings(f"dcpjax serve needs {error.name}: install dcpjax[server]") from error
    server = run.ServerConfig(
        host=host,
        port=port,
        model_names=model_names or (model,),
        api_keys=api_keys,
        max_queued_requests=max_queued_requests,
        shutdown_timeout=shutdown_timeout,
        log_level=log_level,
    )
    with run.bind(server) as bound:
        engine, tokenizer = _load(config)
        names = ", ".join(server.model_names)
        ready = f"ready: {names} at {run.url_of(bound)}/v1 (Ctrl-C stops)"
        is_closed = asyncio.run(
            run.serve(
                engine,
                tokenizer,
                server,
                bound,
                max_num_seqs=config.max_num_seqs,
                on_ready=lambda _: click.echo(ready),
            )
        )
    if not is_closed:  # an ordinary exit would wait for the engine's thread
        os._exit(run.EXIT_FORCED)


@main.command("router", cls=SectionCommand)
@option(
    "Engines",
    "--prefill",
    "prefill_urls",
    multiple=True,
    metavar="URL",
    help="engine that computes prompts, http://host:port; may be given several times",
)
@option(
    "Engines",
    "--decode",
    "decode_urls",
    multiple=True,
    metavar="URL",
    help="engine that generates, http://host:port; may be given several times",
)
@option(
    "Engines",
    "--prefill-fallback",
    type=click.Choice(["decode", "error"]),
    default="decode",
    help="who computes a prompt when no prefill engine can",
)
@option(
    "Engines",
    "--pipelined-prefill",
    is_flag=True,
    help="ask the decode engine when a prompt is begun, so that its finished chunks move while the "
    "next ones are computed; needs prefill engines with pipelined_sends",
)
@option(
    "Engines",
    "--health-interval",
    default=2.0,
    help="seconds between two questions to an engine whether it lives",
)
@_listening_options
@option(
    "Server",
    "--max-open-requests",
    default=1024,
    help="requests under way at the same time; more are refused with 503",
)
def router_command(**settings: Any) -> None:
    """One OpenAI endpoint before engines that compute prompts and engines that generate.

    A request goes to a prefill engine (dcpjax serve with kv_role kv_producer), then with what that
    says about its KV cache to a decode engine (kv_consumer), whose answer is passed on. Requests
    for several choices or prompts go to a decode engine alone.

    \b
    Example: one prefill engine, two decode engines
        dcpjax router --prefill http://10.0.0.1:8000 \\
            --decode http://10.0.0.2:8000 --decode http://10.0.0.3:8000 --port 8080
    """
    try:
        from dcpjax.server import router, router_config, run
    except ModuleNotFoundError as error:
        raise WrongSettings(f"dcpjax router needs {error.name}: install dcpjax[server]") from error
    config = router_config.RouterConfig(**settings)
    with run.bind(config) as bound:
        url = f"{run.url_of(bound)}/v1"

        def announce(server: Any, peers: Any) -> None:
            click.echo(f"ready: {peers.summary()} at {url} (Ctrl-C stops)")

        asyncio.run(router.serve(config, bound, on_ready=announce))


def _load(config: EngineConfig) -> Any:
    from dcpjax.llm import load_engine

    with LoadingProgress() as progress:
        return load_engine(config, progress)


@main.command("generate", cls=SectionCommand)
@option("Generation", "--chat", is_flag=True, help="send PROMPT as a user's message of a chat")
@option("Generation", "--max-tokens", default=128, help="tokens to generate at most")
@option("Generation", "--temperature", default=0.0, help="0 always takes the likeliest token")
@option("Generation", "--top-k", default=0, help="choose among so many likeliest; 0: all")
@option("Generation", "--top-p", default=1.0, help="choose among the likeliest that sum up to it")
@option("Generation", "--sampling-seed", type=int, help="repeat the same random choices")
@option("Generation", "--stop", multiple=True, help="text that ends the answer; repeatable")
@option("Generation", "--ignore-eos", is_flag=True, help="go on up to --max-tokens")
@option("Generation", "--json", "as_json", is_flag=True, help="print one JSON object at the end")
@engine_options
@click.argument("prompt")
def generate_command(
    model: str,
    prompt: str,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    sampling_seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Complete PROMPT with MODEL and print the text. PROMPT "-" is read from standard input."""
    params = dcpjax.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=sampling_seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    text = _read_standard_input() if prompt == "-" else prompt
    if not (text or chat):
        raise WrongSettings("PROMPT has at least one token; it is empty")
    started = time.monotonic()
    with LoadingProgress() as progress:
        llm = dcpjax.LLM(model, progress=progress, **settings)
    with llm:
        load_seconds = time.monotonic() - started
        result = _generate(llm, text, chat, params, echo=not as_json)
        result["timings"]["load_seconds"] = load_seconds
    click.echo(json.dumps(result) if as_json else "")


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise WrongSettings(f"standard input is UTF-8 text: {error}") from error


def _generate(
    llm: "dcpjax.LLM", text: str, chat: bool, params: dcpjax.SamplingParams, *, echo: bool
) -> dict[str, Any]:
    """Stream one answer, and everything about it."""
    from dcpjax.llm.sequence import SequenceRecord

    message = {"role": "user", "content": text}
    prompt_token_ids = llm.encode_chat([message]) if chat else llm.encode(text)
    record = SequenceRecord()
    started = time.monotonic()
    first: float | None = None
    for delta in llm.stream(prompt_token_ids, params):
        first = first or time.monotonic()
        record.add(delta)
        if echo:
            click.echo(delta.text, nl=False)
    ended = time.monotonic()
    first = first or ended
    decode_tokens = len(record.token_ids) - 1
    return {
        "prompt": text,
        "prompt_token_ids": prompt_token_ids,
        "text": record.text,
        "token_ids": record.token_ids,
        "finish_reason": record.finish_reason.value if record.finish_reason else None,
        "stop_reason": record.stop_reason,
        "num_cached_tokens": record.num_cached_tokens,
        "timings": {
            "first_token_seconds": first - started,
            "total_seconds": ended - started,
            "decode_tokens_per_second": decode_tokens / (ended - first) if ended > first else None,
        },
    }
