"""Canaries: each strictness of conftest.py that the other tests rely on does bite."""

import importlib
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import dcpjax

TYPED_MODULE = """
from jaxtyping import Array, Float

def scale(x: Float[Array, "T D"], by: Float[Array, " D"]) -> Float[Array, "T D"]:
    return x * by[None]

def wrong_result(x: Float[Array, "T D"]) -> Float[Array, "D T"]:
    return x
"""


@pytest.fixture
def typed_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the package that exists for one test only, imported as any other."""
    (tmp_path / "typed_module.py").write_text(TYPED_MODULE)
    monkeypatch.setattr(dcpjax, "__path__", [*dcpjax.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "dcpjax.typed_module", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("dcpjax.typed_module")


def test_eight_cpu_devices():
    assert (jax.default_backend(), jax.device_count()) == ("cpu", 8)


def test_subprocesses_inherit_the_devices():
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert "--xla_force_host_platform_device_count=8" in os.environ["XLA_FLAGS"].split()


def test_a_right_shape_passes(typed_module: ModuleType):
    assert typed_module.scale(jnp.ones((2, 3)), jnp.ones(3)).shape == (2, 3)


@pytest.mark.parametrize("shape", [(2,), (2, 1), ()])
def test_a_wrong_argument_shape_raises(typed_module: ModuleType, shape: tuple[int, ...]):
    with pytest.raises(jaxtyping.TypeCheckError):
        typed_module.scale(jnp.ones((2, 3)), jnp.ones(shape))


def test_a_wrong_result_shape_raises(typed_module: ModuleType):
    with pytest.raises(jaxtyping.TypeCheckError):
        typed_module.wrong_result(jnp.ones((2, 3)))


def test_a_wrong_dtype_raises(typed_module: ModuleType):
    with pytest.raises(jaxtyping.TypeCheckError):
        typed_module.scale(jnp.ones((2, 3), jnp.int32), jnp.ones(3))


def test_per_rank_shapes_are_checked_inside_shard_map(typed_module: ModuleType):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec(None, "x")
    on_ranks = jax.shard_map(
        lambda x: typed_module.scale(x, jnp.ones(4)), mesh=mesh, in_specs=split, out_specs=split
    )
    with pytest.raises(jaxtyping.TypeCheckError):
        on_ranks(jnp.ones((2, 4)))  # four columns outside, two on each rank


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
