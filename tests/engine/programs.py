"""Compiled programs that the engines of a test process share.

Most of the time of a test that opens engines goes into tracing and loading what an engine before
has compiled already. Not for tests that change what is traced: they would get, or leave, programs
of another function.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from dcpjax.engine.mtp_drafter import MtpDrafter
from dcpjax.engine.runner import Runner
from dcpjax.engine.sampler import Sampler

_MOST_PROGRAMS = 48
"""Those of a few engines. XLA:CPU maps each program into some hundred pieces of memory, and where a
process may have no more of them (65,530 on Linux) it crashes."""


class _Kept:
    """What was made last, by key, at most so many; whoever asks meanwhile waits."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, Any] = OrderedDict()
        self._locks: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()  # of the two above

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            lock = self._locks[key]
        with lock:
            with self._lock:
                found = self._made.get(key)
            made = make() if found is None else found
        with self._lock:
            self._made[key] = made
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._locks.pop(self._made.popitem(last=False)[0], None)
        return made


_PROGRAMS = _Kept(_MOST_PROGRAMS)


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
