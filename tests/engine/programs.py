"""Compiled programs that the engines of a test process share.

Most of the time of a test that opens engines goes into tracing and loading what an engine before
has compiled already. Not for tests that change what is traced: they would get, or leave, programs
of another function.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from dcpjax.engine.mtp_drafter import MtpDrafter
from dcpjax.engine.runner import Runner
from dcpjax.engine.sampler import Sampler


class _Kept:
    """What was made once for each key; whoever asks meanwhile waits."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._locks: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


_PROGRAMS = _Kept()


def _shapes(arrays: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(arrays)
    return tree, tuple(
        (leaf.shape, str(leaf.dtype), getattr(leaf, "sharding", None)) for leaf in leaves
    )


def _of_runner(runner: Runner) -> Hashable:
    """All that its steps depend on, but the shape."""
    model = runner._model
    return (
        type(runner),
        runner._form,
        model.graph,
        model.partitions,
        runner._sharding,
        runner._mesh,
        runner._vocab_size,
        runner._max_rows,
        runner._max_outputs,
        runner._yields_hidden,
        _shapes(runner._arguments(())),
    )


def _of_sampler(sampler: Sampler) -> Hashable:
    return sampler._vocab_size, sampler._max_rows, _shapes(sampler._state)


@contextmanager
def shared_programs() -> Iterator[None]:
    """Engines that are opened inside use each other's programs, and their audits."""
    steps, samplers, resets = Runner._compile, Sampler.compile, Sampler._compile_reset
    audits, drafts = Runner._audit, MtpDrafter._compile

    def step(self, shape):
        return _PROGRAMS.get(("step", shape, _of_runner(self)), lambda: steps(self, shape))

    def audit(self, shape):
        key = ("audit", shape, _of_runner(self))
        return _PROGRAMS.get(key, lambda: audits(self, shape))

    def sampler(self, form):
        return _PROGRAMS.get(("sampler", form, _of_sampler(self)), lambda: samplers(self, form))

    def reset(self):
        return _PROGRAMS.get(("reset", _of_sampler(self)), lambda: resets(self))

    def draft(self, step, arguments):
        key = "draft", step.shape, self._model.graph, self._sharding, self._mesh
        key = *key, self._speculation, self._vocab_size, _shapes(arguments)
        kept = _PROGRAMS.get(key, lambda: (drafts(self, step, arguments), self.audits[-1:]))
        if self.audits[-1:] != kept[1]:
            self.audits += kept[1]
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, function in (
            (Runner, "_compile", step),
            (Runner, "_audit", audit),
            (Sampler, "compile", sampler),
            (Sampler, "_compile_reset", reset),
            (MtpDrafter, "_compile", draft),
        ):
            patch.setattr(owner, name, function)
        yield
