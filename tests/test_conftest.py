"""Canaries: each strictness of conftest.py that the other tests rely on does bite."""

import importlib
import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.typing import DTypeLike

import dcpjax
from dcpjax.attention.reference import attention_reference
from scripts.plain_code import plain_code

PACKAGE = Path(dcpjax.__file__).parent


def attend(
    q: tuple[int, ...] = (2, 4, 8),
    k: tuple[int, ...] = (3, 2, 8),
    v: tuple[int, ...] = (3, 2, 8),
    *,
    position_dtype: DTypeLike = jnp.int32,
) -> jax.Array:
    """The oracle on ones of these shapes: q [T, H, D], k [S, K, D], v [S, K, Dv]."""
    positions = [jnp.arange(shape[0], dtype=position_dtype) for shape in (q, k)]
    return attention_reference(*map(jnp.ones, (q, k, v)), *positions, scale=1.0)[0]


def test_nine_cpu_devices():
    assert (jax.default_backend(), jax.device_count()) == ("cpu", 9)


def test_subprocesses_inherit_the_devices():
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert "--xla_force_host_platform_device_count=9" in os.environ["XLA_FLAGS"].split()


def test_subprocesses_compile_as_servers_do():
    assert not set(plain_code()) & set(os.environ["XLA_FLAGS"].split())


def test_right_shapes_pass():
    assert attend().shape == (2, 4, 8)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q": (2, 4)},
        {"k": (3, 2, 16)},
        {"v": (2, 2, 8)},
        {"v": (3, 1, 8)},
    ],
    ids=str,
)
def test_a_wrong_shape_raises(shapes: dict[str, tuple[int, ...]]):
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(**shapes)


def test_a_wrong_dtype_raises():
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(position_dtype=jnp.float32)


def test_shapes_of_one_rank_are_checked_inside_shard_map():
    """Widths that agree outside, 16 and 16, do not on a rank that holds half of one of them."""
    q, k, positions = jnp.ones((2, 4, 16)), jnp.ones((2, 2, 16)), jnp.arange(2)

    def attend_to_all(q: jax.Array) -> jax.Array:
        return attention_reference(q, k, k, positions, positions, scale=1.0)[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_width = jax.sharding.PartitionSpec(None, None, "x")
    on_ranks = jax.shard_map(attend_to_all, mesh=mesh, in_specs=by_width, out_specs=by_width)
    assert attend_to_all(q).shape == q.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        on_ranks(q)


def test_every_module_that_annotates_arrays_is_checked():
    paths = [path for path in PACKAGE.rglob("*.py") if "jaxtyping" in path.read_text()]
    assert len(paths) > 5
    for path in paths:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert module.__spec__ is not None
        assert type(module.__spec__.loader).__module__.startswith("jaxtyping"), module.__name__


def test_implicit_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_implicit_dtype_promotion_raises():
    with pytest.raises(ValueError, match="promotion"):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16)


def test_a_warning_is_an_error():
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


def test_compiled_programs_are_kept_between_runs(request: pytest.FixtureRequest):
    folder = Path(jax.config.jax_compilation_cache_dir)
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
    assert any(folder.iterdir())
