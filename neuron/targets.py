"""The chips that programs are made for. Numbers are those of AWS's architecture pages.

A rank is a logical core: with LNC 2 (``--lnc``, NEURON_LOGICAL_NC_CONFIG) two physical cores.
"""

from dataclasses import dataclass

from neuron.errors import TargetError

GIB = 2**30


@dataclass(frozen=True)
class Target:
    """One generation of Trainium.

    Attributes:
        physical_cores: of a chip.
        hbm_bytes: of a chip; the cores share it evenly.
        fp8: types of 8-bit floats that the compiler takes, by NumPy's names.
        lncs: physical cores that one logical core may have.
        chips_per_instance: of the largest instance; 64 logical cores with LNC 2.
        hbm_bytes_per_second, bf16_flops: of a chip.
    """

    name: str
    physical_cores: int
    hbm_bytes: int
    fp8: tuple[str, ...]
    lncs: tuple[int, ...]
    chips_per_instance: int
    hbm_bytes_per_second: float
    bf16_flops: float

    def check_lnc(self, lnc: int) -> None:
        """Raise unless a logical core of this chip may have so many physical ones."""
        if lnc not in self.lncs:
            raise TargetError(
                f"the logical core size of {self.name} is one of {self.lncs}", lnc=lnc
            )

    def cores(self, lnc: int) -> int:
        """Logical cores of a chip."""
        self.check_lnc(lnc)
        return self.physical_cores // lnc

    def instance_cores(self, lnc: int) -> int:
        """Logical cores of the largest instance."""
        return self.cores(lnc) * self.chips_per_instance

    def hbm_bytes_per_core(self, lnc: int) -> int:
        """High-bandwidth memory of a logical core."""
        return self.hbm_bytes // self.cores(lnc)


TARGETS = {
    target.name: target
    for target in (
        Target("trn2", 8, 96 * GIB, ("float8_e4m3", "float8_e5m2"), (1, 2), 16, 2.9e12, 667e12),
        Target(
            "trn3",
            8,
            144 * GIB,
            ("float8_e4m3fn", "float8_e5m2"),
            (1, 2),
            16,
            4.9e12,
            671e12,
        ),
    )
}


def find_target(name: str) -> Target:
    """The target of this name.

    Raises:
        TargetError: there is none.
    """
    if name not in TARGETS:
        raise TargetError(f"a target is one of {', '.join(TARGETS)}", target=name)
    return TARGETS[name]
