"""Settings of every test process, before JAX starts and before the package is imported.

Subprocesses that a test starts inherit the two environment variables and nothing else from here.
"""

import os
from pathlib import Path

from scripts.plain_code import plain_code

NUM_DEVICES = 9
DEVICE_FLAG = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
IS_PLAIN = os.environ.get("DCPJAX_TEST_CODE", "plain") == "plain"
"""Else programs of tests are compiled as those of servers are (``scripts/test --all``)."""

# The last of two equal XLA flags counts, so this wins over a count in the caller's environment.
inherited = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_FLAG}".strip()
os.environ["XLA_FLAGS"] = " ".join([*(plain_code() if IS_PLAIN else ()), inherited])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.devices()  # XLA reads its flags now: processes that tests start compile as servers do
os.environ["XLA_FLAGS"] = inherited

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

PACKAGE = Path(__file__).resolve().parent.parent / "dcpjax"


def modules_with_annotated_arrays() -> list[str]:
    """Names of the modules that use jaxtyping.

    The hook has nothing to check in the others, and makes every call of their functions dearer: the
    simulations of the scheduler take ten times as long with it.
    """
    paths = [path for path in PACKAGE.rglob("*.py") if "jaxtyping" in path.read_text()]
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    return [".".join(names).removesuffix(".__init__") for names in parts]


# Checks shapes and dtypes of every annotated argument and result, per-rank shapes inside shard_map
# included. Never uninstalled: modules are imported as late as inside a test.
jaxtyping.install_import_hook(modules_with_annotated_arrays(), "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A law is not broken because the machine is busy or an example compiles a program.
# CI looks at the same examples every time; elsewhere each run looks at new ones.
settings.register_profile(
    "untimed",
    derandomize="CI" in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs, in pytest's own cache: --cache-clear empties it."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and config.cache is not None:
        folder = config.cache.mkdir("jax-plain" if IS_PLAIN else "jax")
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
