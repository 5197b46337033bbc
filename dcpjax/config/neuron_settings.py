"""Environment variables without which Neuron gives errors, wrong results, or crawls.

Pure: checks look at a mapping, never at the machine. Each says what it found, why it matters, and
what to do. An engine on Neuron refuses to start with a wrong one, see :func:`check_process`;
``python -m neuron.environment`` shows all.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dcpjax.errors import ConfigError

LNC, OLD_LNC = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
ROOT_COMM, VISIBLE_CORES = "NEURON_RT_ROOT_COMM_ID", "NEURON_RT_VISIBLE_CORES"
PROCESS_DEVICES, PROCESS_INDEX = "NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_PJRT_PROCESS_INDEX"
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COMPILER_FLAGS = "NEURON_CC_FLAGS"

Level = Literal["ok", "advice", "wrong"]
_FLAG_LNC = re.compile(r"(?:^|\s)(?:--lnc|-lnc|--logical-nc-config)[=\s]\s*(\d+)(?=\s|$)")
_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


@dataclass(frozen=True)
class Situation:
    """What a process is about to do.

    Attributes:
        nodes: machines that run one engine together.
        lnc: physical cores of a logical one; None: as COMPILER_FLAGS says, if it does.
        transfers_kv: it hands KV to other engines or takes it from them.
        between_machines: some of those engines are on other machines.
        coordinator: host:port of ``jax.distributed``; None: as COORDINATOR says, if it does.
    """

    nodes: int = 1
    lnc: int | None = 2
    transfers_kv: bool = False
    between_machines: bool = False
    coordinator: str | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.lnc not in (None, 1, 2):
            raise ConfigError(
                "there is at least one node, and the logical core size is 1 or 2",
                nodes=self.nodes,
                lnc=self.lnc,
            )

    @property
    def uses_fabric(self) -> bool:
        """Whether data moves between machines."""
        return self.nodes > 1 or (self.transfers_kv and self.between_machines)


@dataclass(frozen=True)
class Finding:
    """One check. ``name`` is the variable or the thing that was looked at."""

    name: str
    level: Level
    found: str
    wanted: str
    reason: str
    fix: str = ""


Check = Callable[[Situation, Mapping[str, str]], Iterator[Finding]]


def check_settings(situation: Situation, environ: Mapping[str, str]) -> list[Finding]:
    """Every check that applies, also those that found nothing wrong."""
    return [finding for check in _CHECKS for finding in check(situation, environ)]


def check_process(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where an engine on Neuron, of this process alone, has a wrong setting."""
    require(check_settings(Situation(lnc=None), environ))


def require(findings: list[Finding]) -> None:
    """Raise ConfigError for the findings that are wrong, all of them at once."""
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if wrong:
        lines = (f"{item.name}: {item.reason}. {item.fix}" for item in wrong)
        raise ConfigError("; ".join(lines), **{item.name: item.found for item in wrong})


def _exactly(
    environ: Mapping[str, str], name: str, wanted: str, reason: str, level: Level = "wrong"
) -> Finding:
    """A variable that has to have one value."""
    found = environ.get(name)
    if found == wanted:
        return Finding(name, "ok", wanted, wanted, reason)
    return Finding(name, level, _shown(found), wanted, reason, f"export {name}={wanted}")


def _unset(
    environ: Mapping[str, str], name: str, reason: str, level: Level, harmless: str = "0"
) -> Finding:
    """A variable that has to be unset, or to have its harmless value."""
    found = environ.get(name)
    if found in (None, "", harmless):
        return Finding(name, "ok", _shown(found), "unset", reason)
    return Finding(name, level, _shown(found), "unset", reason, f"unset {name}")


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _core_size(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    flag = _FLAG_LNC.search(environ.get(COMPILER_FLAGS, ""))
    compiled = flag[1] if flag else None
    wanted = compiled if situation.lnc is None else str(situation.lnc)
    if wanted is None:
        return
    reason = "a NEFF runs only on logical cores of the size it was compiled for (--lnc)"
    yield _exactly(environ, LNC, wanted, reason)
    if compiled not in (None, wanted):
        why = "the plugin would compile for logical cores of another size"
        fix = f"write --lnc {wanted} in {COMPILER_FLAGS}"
        yield Finding(COMPILER_FLAGS, "wrong", f"--lnc {compiled}", f"--lnc {wanted}", why, fix)
    old = environ.get(OLD_LNC)
    if old not in (None, wanted):
        why = f"the old name of {LNC}, and it says something else"
        yield Finding(OLD_LNC, "wrong", _shown(old), "unset", why, f"unset {OLD_LNC}")


def _cores(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    if VISIBLE_CORES not in environ:
        return
    found, form = environ[VISIBLE_CORES], "a list such as 0-3 or 0,1"
    reason = "the logical cores of this process, instead of all"
    try:
        visible_cores(found)
    except ConfigError as error:
        yield Finding(VISIBLE_CORES, "wrong", _shown(found), form, error.rule, f"write {form}")
    else:
        yield Finding(VISIBLE_CORES, "ok", found, form, reason)
    if "NEURON_RT_NUM_CORES" in environ:
        why = f"{VISIBLE_CORES} wins over it"
        yield _unset(environ, "NEURON_RT_NUM_CORES", why, "advice", harmless="")


def visible_cores(text: str) -> tuple[int, ...]:
    """The cores of a list such as "0-3" or "0,1", in its order.

    Raises:
        ConfigError: it is no such list, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = _CORES.fullmatch(part.strip())
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not span:
            raise ConfigError(f"{VISIBLE_CORES} is a list of cores", value=text)
        cores += span
    if len(set(cores)) != len(cores):
        raise ConfigError(f"{VISIBLE_CORES} names cores once each", value=text)
    return tuple(cores)


def _numerics(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    why = "results would differ from run to run, and from the reference"
    yield _unset(environ, "NEURON_RT_STOCHASTIC_ROUNDING_EN", why, "wrong")
    why = "programs without a collective would run on the host, thousands of times slower"
    yield _unset(environ, "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU", why, "wrong")


def _runtime(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    platforms = environ.get("JAX_PLATFORMS")
    if platforms is not None and "neuron" in platforms and "cpu" not in platforms:
        why = "weights are made on the CPU, which JAX then does not offer"
        yield _exactly(environ, "JAX_PLATFORMS", "neuron,cpu", why)
    why = "it was removed in Neuron 2.31: steps no longer overlap by it"
    yield _unset(environ, "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", why, "advice", harmless="")
    why = "it is for tests of the runtime alone"
    yield _unset(environ, "NEURON_RT_ALLOW_LEGACY_NEFF", why, "advice")


def shared_memory(environ: Mapping[str, str]) -> Finding:
    """Whether libfabric keeps off the way that it takes between processes of one machine."""
    reason = "between engines of one machine, libfabric's shared memory gives wrong KV"
    return _exactly(environ, "FI_EFA_ENABLE_SHM_TRANSFER", "0", reason)


def _transfer(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    if situation.transfers_kv:  # also between machines: an engine with LIBFABRIC asks for it always
        yield shared_memory(environ)


def _fabric(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not situation.uses_fabric:
        return
    yield _exactly(environ, "FI_PROVIDER", "efa", "machines talk over EFA, not over TCP")
    yield _exactly(
        environ, "FI_EFA_USE_DEVICE_RDMA", "1", "EFA reads and writes the devices' memory itself"
    )
    yield _exactly(
        environ, "FI_EFA_FORK_SAFE", "1", "a child process would break registered memory"
    )


def _processes(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    """One process per node: how many devices each has, and which one this is."""
    if situation.nodes == 1:
        return
    nodes = situation.nodes
    counts = environ.get(PROCESS_DEVICES)
    parts = (counts or "").split(",")
    is_good = len(parts) == nodes and all(part.isdecimal() and int(part) > 0 for part in parts)
    wanted, reason = f"{nodes} counts such as 64,64", "every process knows the devices of all"
    fix = "" if is_good else f"export {PROCESS_DEVICES}={','.join(['64'] * nodes)}"
    level: Level = "ok" if is_good else "wrong"
    yield Finding(PROCESS_DEVICES, level, _shown(counts), wanted, reason, fix)
    index = environ.get(PROCESS_INDEX)
    is_good = index is not None and index.isdecimal() and int(index) < nodes
    fix = "" if is_good else f"export {PROCESS_INDEX}=<this node's number, from 0>"
    reason = "the ranks of a process follow from its number"
    level = "ok" if is_good else "wrong"
    yield Finding(PROCESS_INDEX, level, _shown(index), f"0 to {nodes - 1}", reason, fix)


def _root(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Where the ranks meet. On one node the plugin chooses a port itself."""
    found = environ.get(ROOT_COMM)
    if found is None and situation.nodes == 1:
        return
    wanted = "host:port, the same on all nodes"
    broken = _broken_root(situation, environ, found)
    if broken is None:
        yield Finding(ROOT_COMM, "ok", _shown(found), wanted, "collectives start there")
    else:
        fix = f"export {ROOT_COMM}=<address of the first node>:<a port of its own>"
        yield Finding(ROOT_COMM, "wrong", _shown(found), wanted, broken, fix)


def _broken_root(situation: Situation, environ: Mapping[str, str], found: str | None) -> str | None:
    if found is None:
        return "collectives of several processes never start without it"
    address = _address(found)
    if address is None:
        return "it is host:port"
    if situation.nodes > 1 and address[0].startswith(_LOOPBACK):
        return "other nodes cannot reach a loopback address"
    coordinator = situation.coordinator or environ.get(COORDINATOR)
    if coordinator and _address(coordinator) == address:
        return "it has a port of its own: jax.distributed listens on this one"
    return None


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None


_CHECKS: tuple[Check, ...] = (
    _core_size,
    _cores,
    _numerics,
    _runtime,
    _transfer,
    _fabric,
    _processes,
    _root,
)
