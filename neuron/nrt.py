"""One NEFF on one logical core, through nrtpy. The only module that touches it.

Written after nrtpy's published API and not yet run on a device.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neuron.errors import EnvironmentSettingError, NeuronError
from neuron.inputs import NeffTensor

_INSTALL_HINT = (
    "NEFFs are run with nrtpy: install it from AWS's own Neuron package index (SDK 2.32 or newer), "
    "and have /opt/aws/neuron/lib on LD_LIBRARY_PATH; it shares no environment with the package nki"
)


class RunError(NeuronError):
    """A NEFF that cannot be loaded, or failed on the device."""


def require_nrtpy() -> None:
    """Raise EnvironmentSettingError where there is no nrtpy, without loading it."""
    if importlib.util.find_spec("nrtpy") is None:
        raise EnvironmentSettingError(_INSTALL_HINT)


class LoadedNeff:
    """A NEFF that is ready to run as one rank. One per process, which sees one core only."""

    def __init__(self, neff: Path, *, core: int, rank: int, world_size: int) -> None:
        """Load it. All ranks of a program with collectives have to do so at the same time.

        Raises:
            RunError: nrtpy does not work here, or the runtime refuses.
        """
        try:
            import nrtpy  # pyright: ignore[reportMissingImports]
        except (ImportError, OSError) as error:  # OSError: a library of the runtime is missing
            raise RunError(_INSTALL_HINT, why=str(error)) from error
        self._nrtpy: Any = nrtpy
        try:
            nrtpy.configure(visible_cores=[core])
            self._model: Any = nrtpy.NrtpyModel.load_from_neff(
                str(neff), core_id=0, cc_enabled=world_size > 1, rank_id=rank, world_size=world_size
            )
        except RuntimeError as error:  # of the runtime, and the base of nrtpy's own errors
            raise RunError("a NEFF can be loaded", neff=str(neff), why=str(error)) from error

    @property
    def inputs(self) -> list[NeffTensor]:
        return _described(self._model.input_tensors_info)

    @property
    def outputs(self) -> list[NeffTensor]:
        return _described(self._model.output_tensors_info)

    def durations_ms(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        shared: Mapping[str, str],
        *,
        warmup: int,
        iterations: int,
        mode: str,
    ) -> list[float]:
        """Milliseconds of each iteration.

        Args:
            outputs: arrays of the outputs' sizes.
            shared: {output: input} that are one tensor.
            mode: "device" or "host".
        """
        make = self._nrtpy.NrtpyTensor.from_numpy
        try:
            given = {name: make(array, name=name) for name, array in inputs.items()}
            taken = {
                name: given[shared[name]] if name in shared else make(array, name=name)
                for name, array in outputs.items()
            }
            result = self._model.benchmark(
                given, taken, warmup_iter=warmup, benchmark_iter=iterations, mode=mode
            )
        except RuntimeError as error:
            raise RunError("a NEFF runs", why=str(error)) from error
        return [float(duration) for duration in result.durations_ms]

    def close(self) -> None:
        """Free the device, for the next program of this process."""
        self._model = None
        self._nrtpy.reset()


def _described(tensors: Mapping[str, Any]) -> list[NeffTensor]:
    return [NeffTensor(name, int(info.size)) for name, info in tensors.items()]
