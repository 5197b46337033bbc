"""Compiled programs: kept between processes, and counted where nobody expected one.

JAX reports compilations per process, so the count is per process too.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import platformdirs

_COMPILED = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Compilations outside of :meth:`expected` blocks, in any thread, since it was made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expecting = 0
        self.unexpected = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations inside are part of a warm-up."""
        with self._lock:
            self._expecting += 1
        try:
            yield
        finally:
            with self._lock:
                self._expecting -= 1

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            with self._lock:
                self.unexpected += not self._expecting


COMPILATIONS = CompilationCounter()
"""The process's counter: JAX's listeners cannot be taken back, so there is one."""


def keep_compiled_programs() -> None:
    """Keep compiled programs between processes, unless JAX was told where already."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        folder = Path(platformdirs.user_cache_dir("dcpjax")) / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
