"""What this machine has: Neuron devices, EFA adapters, and the libraries of a transfer.

Looks, and changes nothing. The libraries are loaded to ask for their versions, as what a package
manager says is not what a process gets; so this belongs into a process that then ends.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dcpjax.config.neuron_settings import Finding, Level, Situation

PCI = Path("/sys/bus/pci/devices")

_AMAZON = 0x1D0F
_NEURON_CHIPS = {
    0x7264: "inf2",
    0x7164: "trn1",
    0x7364: "trn2",
    0x7564: "trn3",
    0x7565: "trn3",
}
_EFA_IDS = frozenset({0xEFA0, 0xEFA1, 0xEFA2, 0xEFA3})
_LIBFABRIC_LEAST, _LIBFABRIC_GOOD = (1, 21), (2, 0)
_NIXL_LEAST = (0, 10)
_NIXL_PACKAGES = ("nixl", "nixl-cu12", "nixl-cu13")


@dataclass(frozen=True)
class Machine:
    """What was found. A version is None where the library is not there.

    Attributes:
        cuda_stub: whether libcuda.so.1 can be loaded; NIXL's published wheel wants it, stub or not.
    """

    neuron_devices: int
    efa_adapters: int
    libfabric: tuple[int, ...] | None
    hwloc: tuple[int, ...] | None
    nixl: tuple[int, ...] | None
    cuda_stub: bool


def look(pci: Path = PCI) -> Machine:
    """This machine."""
    return Machine(
        neuron_devices=sum(neuron_chips(pci).values()),
        efa_adapters=sum(device in _EFA_IDS for device in _amazon_devices(pci)),
        libfabric=_library_version("libfabric.so.1", "fi_version", _split_16),
        hwloc=_library_version("libhwloc.so.15", "hwloc_get_api_version", _split_8),
        nixl=_nixl_version(),
        cuda_stub=_load("libcuda.so.1") is not None,
    )


def neuron_chips(pci: Path = PCI) -> dict[str, int]:
    """How many Neuron devices of each kind this machine has, e.g. {"trn2": 16}."""
    chips = (_NEURON_CHIPS.get(device) for device in _amazon_devices(pci))
    return dict(Counter(chip for chip in chips if chip is not None))


def check_machine(situation: Situation, machine: Machine) -> list[Finding]:
    """Every check of the machine that applies."""
    findings = [_devices(machine)]
    if situation.uses_fabric or situation.transfers_kv:
        level: Level = "wrong" if situation.transfers_kv else "advice"
        findings.append(_adapters(machine, level))
        findings.append(_libfabric(machine))
    if situation.transfers_kv:
        findings += [_hwloc(machine), _nixl(machine), _cuda(machine)]
    return findings


def _devices(machine: Machine) -> Finding:
    found, wanted = str(machine.neuron_devices), "at least 1"
    reason = "programs run on Neuron devices; compiling needs none"
    if machine.neuron_devices:
        return Finding("Neuron devices", "ok", found, wanted, reason)
    fix = "use a trn2 or trn3 instance, with the driver aws-neuronx-dkms"
    return Finding("Neuron devices", "wrong", found, wanted, reason, fix)


def _adapters(machine: Machine, level: Level) -> Finding:
    name, reason = "EFA adapters", "a device's memory is reached over the adapter beside it"
    found, wanted = str(machine.efa_adapters), f"{machine.neuron_devices}, one per device"
    if machine.efa_adapters >= machine.neuron_devices:
        return Finding(name, "ok", found, wanted, reason)
    fix = "attach all network interfaces as EFA; trn2.3xlarge has too few for a transfer"
    return Finding(name, level, found, wanted, reason, fix)


def _libfabric(machine: Machine) -> Finding:
    name, reason = "libfabric", "EFA with device memory"
    fix = "install aws-efa-installer 1.47 or newer; LD_LIBRARY_PATH has /opt/amazon/efa/lib"
    good, least = _text(_LIBFABRIC_GOOD), _text(_LIBFABRIC_LEAST)
    found = machine.libfabric
    if found is None or found < _LIBFABRIC_LEAST:
        return Finding(name, "wrong", _text(found), f">= {least}, better {good}", reason, fix)
    if found < _LIBFABRIC_GOOD:
        return Finding(name, "advice", _text(found), f">= {good}", reason, fix)
    return Finding(name, "ok", _text(found), f">= {good}", reason)


def _hwloc(machine: Machine) -> Finding:
    reason = "NIXL's LIBFABRIC plugin finds the adapter beside a device with it"
    if machine.hwloc is not None:
        return Finding("hwloc", "ok", _text(machine.hwloc), "any", reason)
    return Finding("hwloc", "wrong", "missing", "any", reason, "install the package hwloc")


def _nixl(machine: Machine) -> Finding:
    wanted, reason = f">= {_text(_NIXL_LEAST)}", "older ones know no Neuron memory"
    if machine.nixl is not None and machine.nixl >= _NIXL_LEAST:
        return Finding("nixl", "ok", _text(machine.nixl), wanted, reason)
    fix = "install a newer NIXL, see neuron/README.md"
    return Finding("nixl", "wrong", _text(machine.nixl), wanted, reason, fix)


def _cuda(machine: Machine) -> Finding:
    name, reason = "libcuda.so.1", "NIXL's published wheel cannot load LIBFABRIC without it"
    if machine.cuda_stub:
        return Finding(name, "ok", "there", "a stub will do", reason)
    fix = "put a stub of libcuda.so.1 on LD_LIBRARY_PATH, or build NIXL without CUDA"
    return Finding(name, "advice", "missing", "a stub will do", reason, fix)


def _text(version: tuple[int, ...] | None) -> str:
    return "missing" if version is None else ".".join(map(str, version))


def _amazon_devices(pci: Path) -> Iterator[int]:
    """PCI device ids of Amazon's devices."""
    for folder in sorted(pci.glob("*")):
        try:
            vendor = int((folder / "vendor").read_text(), 16)
            device = int((folder / "device").read_text(), 16)
        except (OSError, ValueError):
            continue  # unplugged meanwhile, or no PCI device
        if vendor == _AMAZON:
            yield device


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _library_version(
    name: str, function: str, split: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...] | None:
    library = _load(name)
    if library is None:
        return None
    ask = getattr(library, function)
    ask.restype, ask.argtypes = ctypes.c_uint32, []
    return split(ask())


def _split_16(version: int) -> tuple[int, ...]:
    return version >> 16, version & 0xFFFF


def _split_8(version: int) -> tuple[int, ...]:
    return version >> 16, version >> 8 & 0xFF, version & 0xFF


def _nixl_version() -> tuple[int, ...] | None:
    for package in _NIXL_PACKAGES:
        try:
            text = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        numbers = (part for part in text.split(".") if part.isdecimal())
        return tuple(int(part) for part in numbers)
    return None
