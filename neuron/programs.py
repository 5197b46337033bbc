"""The engine's compiled steps as programs of one rank.

They are the functions that :class:`dcpjax.engine.runner.Runner` compiles, in the same shapes, for
arrays that do not exist: neither the ranks' devices nor weights are needed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dcpjax.cache.page_moves import gather_pages, scatter_pages
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.engine.pool_mirror import MOVED_PAGES
from neuron.calls import POOL, pool_name
from neuron.calls import Call as Call
from neuron.deployment import Deployment as Deployment
from neuron.program import IndexRange, Program, ProgramKind
from neuron.step_calls import step_calls


def build_programs(deployment: Deployment, *, all_buckets: bool = True) -> list[Program]:
    """Every program that the engine runs there, lowered; arguments as for :func:`find_calls`."""
    return [call.lower() for call in find_calls(deployment, all_buckets=all_buckets)]


def find_calls(deployment: Deployment, *, all_buckets: bool = True) -> list[Call]:
    """Every function that the engine compiles there, with its arguments.

    Args:
        all_buckets: every shape that the engine compiles; else the largest of each kind.
    """
    return [*step_calls(deployment, all_buckets=all_buckets), *_page_calls(deployment)]


def _page_calls(deployment: Deployment) -> list[Call]:
    """Whole pages out of each pool and into it, for transfers by the host's memory."""
    pools = deployment.pool_arrays
    named = [(pool_name(part), pool) for part, pool in pools.items()]
    return [call for name, pool in named for call in _page_calls_of(deployment, name, pool)]


def _page_calls_of(deployment: Deployment, name: str, pool: jax.ShapeDtypeStruct) -> list[Call]:
    mesh = deployment.mesh
    ids = deployment.array((MOVED_PAGES,), jnp.int32, PartitionSpec())
    dcp = deployment.config.decode_context_parallel_size
    pages = deployment.array((dcp * MOVED_PAGES, *pool.shape[1:]), pool.dtype, POOL_SPEC)
    suffix = name.removeprefix(POOL)
    ranges = {"ids": (IndexRange(0, MOVED_PAGES, 0, deployment.pools.scratch_page),)}

    def call(kind: ProgramKind, function: Any, inputs: dict[str, Any], output: str) -> Call:
        ranks, names = deployment.config.tensor_parallel_size, tuple(inputs)
        title, arguments = f"{kind}{suffix}_{MOVED_PAGES}", tuple(inputs.values())
        return Call(title, kind, ranks, function, arguments, names, (output,), ranges)

    taken = {name: pool, "ids": ids}
    return [
        call("page_gather", gather_pages(mesh), taken, "pages"),
        call("page_scatter", scatter_pages(mesh), {**taken, "pages": pages}, name),
    ]
