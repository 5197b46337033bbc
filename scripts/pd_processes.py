"""Prefill and decode engines and their router as processes that can be killed, frozen, restarted.

An engine keeps its two addresses, HTTP and side channel, over all its processes, as a machine does;
its identity and, if wanted, its mesh are new with each.
"""

import contextlib
import json
import random
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from server_process import ServerProcess

HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Below those that a system gives to outgoing connections: nobody takes one while its owner is
dead."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Mesh:
    """The shape of an engine."""

    tp: int
    dcp: int

    @classmethod
    def read(cls, text: str) -> "Mesh":
        """From TP/DCP, as on the command line."""
        tp, dcp = text.split("/")
        return cls(int(tp), int(dcp))


@dataclass(frozen=True)
class EngineRole:
    """What does not change from process to process of an engine.

    Attributes:
        settings: of EngineConfig, but for those of the mesh and the transfer.
        transfer: of KVTransferConfig, but for the address.
    """

    name: str
    model: str
    settings: Settings
    transfer: Settings


class Engine:
    """One engine, alive or not."""

    def __init__(self, role: EngineRole, port: int, kv_port: int) -> None:
        self.name = role.name
        self.url = f"http://{HOST}:{port}"
        self.kv_port = kv_port
        self.num_tracebacks = 0
        self._role = role
        self._port = port
        self._process: ServerProcess | None = None
        self._is_frozen = False

    @property
    def policy(self) -> str:
        """What happens to a request whose KV cannot be loaded."""
        return self._role.transfer.get("kv_load_failure_policy", "fail")

    def start(self, mesh: Mesh) -> None:
        """A new process. Whether it can serve is :meth:`wait_until_ready`'s answer."""
        assert self._process is None, f"{self.name} runs already"
        settings = {
            **self._role.settings,
            "tensor_parallel_size": mesh.tp,
            "decode_context_parallel_size": mesh.dcp,
        }
        transfer = json.dumps({**self._role.transfer, "kv_ip": HOST, "kv_port": self.kv_port})
        self._process = ServerProcess(
            [
                *("serve", self._role.model, "--host", HOST, "--port", str(self._port)),
                *command_line(settings),
                *("--kv-transfer-config", transfer),
            ]
        )

    def wait_until_ready(self) -> None:
        """Raises ServerEnded where the process could not start."""
        self._running.wait_until_ready()

    def kill(self) -> None:
        """End the process, frozen or not, without a chance to say anything to anybody."""
        self._running.kill()
        self._forget()

    def freeze(self) -> None:
        """The process stands still; its connections stay open."""
        self._running.send(signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        self._running.send(signal.SIGCONT)
        self._is_frozen = False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """End the process as an operator does; its exit code, or None where there is none."""
        if self._process is None:
            return None
        if self._is_frozen:
            self.thaw()
        code = self._process.stop(number)
        self._forget()
        return code

    def _forget(self) -> None:
        self.num_tracebacks += self._running.num_tracebacks
        self._process, self._is_frozen = None, False

    @property
    def _running(self) -> ServerProcess:
        assert self._process is not None, f"{self.name} does not run"
        return self._process


@dataclass(frozen=True)
class Cluster:
    """All processes of one endpoint."""

    prefill: Sequence[Engine]
    decode: Sequence[Engine]
    router: ServerProcess
    url: str

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]


@contextlib.contextmanager
def running_cluster(
    prefill: Sequence[EngineRole], decode: Sequence[EngineRole], meshes: Sequence[Mesh]
) -> Iterator[Cluster]:
    """Engines and a router that are ready. Everything is ended on every way out.

    Args:
        meshes: of the prefill engines, then of the decode engines.

    Raises:
        ServerEnded: one could not start.
    """
    roles = [*prefill, *decode]
    ports = iter(free_ports(2 * len(roles)))
    engines = [Engine(role, next(ports), next(ports)) for role in roles]
    with contextlib.ExitStack() as ends:
        for engine, mesh in zip(engines, meshes, strict=True):
            ends.callback(engine.stop)
            engine.start(mesh)
        for engine in engines:
            engine.wait_until_ready()
        sides = engines[: len(prefill)], engines[len(prefill) :]
        router = _start_router(*sides)
        ends.callback(router.stop)
        yield Cluster(*sides, router, router.wait_until_ready())


def _start_router(prefill: Sequence[Engine], decode: Sequence[Engine]) -> ServerProcess:
    named = [word for engine in prefill for word in ("--prefill", engine.url)]
    named += [word for engine in decode for word in ("--decode", engine.url)]
    return ServerProcess(["router", *named, "--port", "0", "--health-interval", "0.3"])


def command_line(settings: Settings) -> list[str]:
    """Settings of an engine as its options."""
    words: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens now, and which nobody is given by chance."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} ports of {_PORTS} are free")
