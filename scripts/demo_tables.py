"""What the demo shows at the end: who holds what, and what went from where to where."""

import urllib.request
from dataclasses import dataclass
from typing import Any

from demo_client import Answer, get_json, open_url
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from dcpjax.layout import local_filled


@dataclass(frozen=True)
class Pool:
    """The KV pool of one rank, as the server's metrics describe it."""

    num_bytes: int
    num_pages: int
    page_size: int

    @property
    def bytes_per_token(self) -> float:
        """The pool has one page more than it can use, the scratch page."""
        return self.num_bytes / ((self.num_pages + 1) * self.page_size)


def read_pool(url: str) -> Pool:
    with open_url(urllib.request.Request(f"{url}/metrics")) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = {sample.name: sample for family in families for sample in family.samples}
    shape = samples["vllm:cache_config_info"].labels
    return Pool(
        int(samples["dcpjax:kv_bytes_per_rank"].value),
        int(shape["num_gpu_blocks"]),
        int(shape["block_size"]),
    )


def rank_table(answer: Answer, pool: Pool, *, dcp: int, interleave: int) -> Table:
    """What each rank holds of this conversation, and of the pool that was allocated for it.

    The last token was sampled and never computed, so it has no keys and values.
    """
    length = answer.prompt_tokens + answer.completion_tokens - 1
    table = Table(title=f"KV cache of {length} tokens over {dcp} decode ranks")
    for column in ("rank", "tokens", "bytes of them", "bytes of the pool"):
        table.add_column(column, justify="right")
    for rank in range(dcp):
        held = local_filled(length, rank, ranks=dcp, interleave=interleave)
        table.add_row(
            str(rank), str(held), mebibytes(held * pool.bytes_per_token), mebibytes(pool.num_bytes)
        )
    return table


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def summary(answer: Answer) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens of the prompt", str(answer.prompt_tokens))
    table.add_row("time to first token", f"{answer.seconds_to_first:.2f} s")
    table.add_row("decode", f"{answer.tokens_per_second:.1f} tokens/s")
    return table


def reshard_table(url: str) -> Table:
    """The last transfer: bytes and pieces from each rank of the source to each of the target."""
    transfer: dict[str, Any] = get_json(f"{url}/stats")["kv_transfer"]
    last = transfer["last_transfer"]
    table = Table(
        title=f"reshard: {mebibytes(last['num_bytes'])} over {last['backend']} in "
        f"{1000 * last['seconds']:.0f} ms"
    )
    table.add_column("prefill rank")
    for target in range(len(last["bytes"][0])):
        table.add_column(f"to decode rank {target}", justify="right")
    for rank, (sizes, pieces) in enumerate(zip(last["bytes"], last["pieces"], strict=True)):
        cells = [
            f"{mebibytes(size)} in {count}" if size else "-"
            for size, count in zip(sizes, pieces, strict=True)
        ]
        table.add_row(str(rank), *cells)
    if len(last["parts"]) > 1:
        table.caption = ", ".join(f"{part} {mebibytes(n)}" for part, n in last["parts"].items())
    return table
