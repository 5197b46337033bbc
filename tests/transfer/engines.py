"""Engines with a backend for tests of the backends: in this process, or each in its own."""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from dcpjax import errors
from dcpjax.layout import KVPlacement
from dcpjax.transfer.backend import wait
from dcpjax.transfer.bind import bind
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import plan_transfer
from tests.transfer.simulated import BASE, SimulatedEngine

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "assets" / "transfer_engine.py"
ANSWER_SECONDS = 40  # longer than anything here takes; a hang, not a slow machine

CACHE = {"layers": 5, "kv_heads": 1}
PLACEMENTS = {
    "source": KVPlacement.layer_split(3, page_size=4, **CACHE),
    "target": KVPlacement.decode(4, 2, page_size=8, interleave=4, **CACHE),
}
NUM_TOKENS = 50


def simulated(side: str, seed: int, items_per_token: int = 1) -> SimulatedEngine:
    """The same engine in every process; the source is filled."""
    rng = np.random.default_rng(seed)
    engine = SimulatedEngine.build(
        PLACEMENTS[side], NUM_TOKENS, rng, items_per_token=items_per_token
    )
    if side == "source":
        engine.fill(NUM_TOKENS)
    return engine


class Engine:
    """One side of a transfer. Arguments and results of its methods are JSON."""

    def __init__(self, backend, side: str, seed: int, items_per_token: int = 1):
        self.backend, self.side = backend, side
        self.data = simulated(side, seed, items_per_token).data
        memory = simulated(side, seed, items_per_token).memory
        start = self.data.ctypes.data - BASE
        ranks = tuple(
            dataclasses.replace(rank, address=rank.address + start) for rank in memory.ranks
        )
        self.memory = SequenceMemory(memory.placement, ranks, memory.page_ids)
        self.transfers = []

    def register(self):
        self.backend.register(self.memory.ranks)

    def hello(self):
        return {
            "agent": self.backend.agent.hex(),
            "ranks": [dataclasses.astuple(rank) for rank in self.memory.ranks],
            "page_ids": np.asarray(self.memory.page_ids).tolist(),
        }

    def connect(self, peer, agent):
        self.backend.connect(peer, bytes.fromhex(agent))

    def disconnect(self, peer):
        self.backend.disconnect(peer)

    def submit(self, peer, hello, first, stop, shift=0):
        """Start the transfer of tokens [first, stop); ``shift`` moves this side's memory."""
        other_side = "source" if self.side == "target" else "target"
        other = SequenceMemory(
            PLACEMENTS[other_side],
            tuple(RankMemory(*rank) for rank in hello["ranks"]),
            hello["page_ids"],
        )
        ranks = (
            dataclasses.replace(rank, address=rank.address + shift) for rank in self.memory.ranks
        )
        own = dataclasses.replace(self.memory, ranks=tuple(ranks))
        sides = {self.side: own, other_side: other}
        plan = plan_transfer(
            PLACEMENTS["source"], PLACEMENTS["target"], num_tokens=stop, first_token=first
        )
        bound = bind(plan, sides["source"], sides["target"])
        self.transfers.append(self.backend.submit(bound, peer))
        return len(self.transfers) - 1

    def wait(self, transfer, seconds):
        return wait(self.transfers[transfer], seconds).value

    def release(self, transfer):
        self.transfers[transfer].release()

    def contents(self):
        return self.data.tobytes().hex()

    def close(self):
        self.backend.close()


class Here:
    """An engine of this process."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def call(self, name, *arguments):
        return getattr(self.engine, name)(*arguments)

    def kill(self):
        self.engine.close()

    def end(self):
        self.engine.close()


class Elsewhere:
    """An engine of another process."""

    def __init__(self, backend, side, seed, items_per_token=1, **environment):
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, backend, side, str(seed), str(items_per_token)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        self.lines = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def call(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        """The next line on stdout: an answer and nothing else."""
        line = self.lines.get(timeout=ANSWER_SECONDS)
        assert line, f"the process ended: {self.process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return answer["result"]

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """Let it leave; what is left on stdout must be nothing."""
        try:
            if self.process.poll() is None:
                self.process.stdin.close()
                assert self.process.wait(ANSWER_SECONDS) == 0
                assert self.lines.get(timeout=ANSWER_SECONDS) == ""
        finally:
            self.kill()
            self.reader.join()
            self.process.stdin.close()
            self.process.stdout.close()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")
