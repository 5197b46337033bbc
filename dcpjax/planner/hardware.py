"""Devices: memory, rates and links. Collectives as measured on one, scaled to the others."""

import math
from dataclasses import dataclass, fields

from dcpjax.errors import ConfigError
from dcpjax.planner.data import read_data
from dcpjax.planner.provenance import Constant, Kind

GIB = 1 << 30

_UNITS = {
    "memory_gib": "GiB",
    "memory_tb_s": "TB/s",
    "bf16_tflops": "TFLOP/s, dense",
    "fp8_tflops": "TFLOP/s, dense",
    "scale_up_gb_s": "GB/s each way, inside a node",
    "scale_out_gb_s": "GB/s each way, between nodes",
    "host_gb_s": "GB/s each way, to the host's memory",
}


@dataclass(frozen=True)
class Device:
    """One chip. ``node`` chips share the fast links; units as the names say."""

    name: str
    title: str
    node: int
    backend: str
    source: str
    kind: Kind
    memory_gib: float
    memory_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    scale_up_gb_s: float
    scale_out_gb_s: float
    host_gb_s: float

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def ridge(self) -> float:
        """FLOP per byte from which bfloat16 work is bound by compute."""
        return self.bf16_tflops / self.memory_tb_s

    def tflops(self, dtype: str) -> float:
        """Rate of products of this type of weights."""
        return self.fp8_tflops if dtype.startswith(("fp8", "float8")) else self.bf16_tflops

    @property
    def constants(self) -> tuple[Constant, ...]:
        """What the data sheet gives, one by one."""
        return tuple(
            Constant(f"{self.name}.{name}", getattr(self, name), unit, self.kind, self.source)
            for name, unit in _UNITS.items()
        )


def known_devices() -> tuple[str, ...]:
    """Names that :func:`find_device` knows."""
    return tuple(read_data("devices"))


def find_device(device: str | Device) -> Device:
    """A device by its name, in any case.

    Raises:
        ConfigError: no such device.
    """
    if isinstance(device, Device):
        return device
    known = read_data("devices")
    if device.lower() not in known:
        raise ConfigError("the device is known", device=device, known=list(known))
    values = known[device.lower()]
    names = {item.name for item in fields(Device)} - {"name"}
    return Device(name=device.lower(), **{name: values[name] for name in names})


def constant(name: str) -> Constant:
    """A constant that no data sheet gives: efficiencies, floors, reserves."""
    entry = read_data("constants")[name]
    return Constant(name, entry["value"], entry["unit"], entry["kind"], entry["source"])


def all_constants() -> tuple[Constant, ...]:
    """All constants that are no device's."""
    return tuple(constant(name) for name in read_data("constants"))


def collective_seconds(kind: str, ranks: int, num_bytes: float, device: Device) -> float:
    """Time of one collective inside a node.

    ``alpha + bytes / bandwidth`` as fitted on H200; other devices: the bandwidth times the ratio of
    their links, the same alpha. Other numbers of ranks: alpha and bandwidth of the next larger
    table entry, and beyond the largest alpha grows with the logarithm.

    Args:
        num_bytes: the whole message, as :class:`dcpjax.planner.traffic.Collective` counts it.
    """
    if ranks <= 1:
        return 0.0
    table = read_data("collectives")
    fits = table["fits"][kind]
    sizes = sorted(int(size) for size in fits)
    size = next((size for size in sizes if size >= ranks), sizes[-1])
    alpha_us, bandwidth_gb_s = fits[str(size)]
    if ranks > size:
        alpha_us *= math.log2(ranks) / math.log2(size)
    bandwidth_gb_s *= device.scale_up_gb_s / find_device(table["device"]).scale_up_gb_s
    return alpha_us * 1e-6 + num_bytes / (bandwidth_gb_s * 1e9)
