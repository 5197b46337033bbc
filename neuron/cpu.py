"""Run a program's exact bytes on CPU devices, as so many replicas of one program.

This is the proof that can be had without Trainium: what neuronx-cc is given computes what JAX
computes. The collectives' groups, the ids and the aliases are those of the file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# Compiling a module that does not come from a trace has no public name in JAX.
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcpjax.engine.engine import Engine
from dcpjax.engine.runner import Runner
from dcpjax.engine.step import STEP_OUTPUTS
from neuron.lowering import lower
from neuron.program import to_bytes


class CpuProgram:
    """A compiled program, one replica on each device of a mesh.

    Args:
        serialized: HloModuleProto.
        outputs: shape of each whole output, and its partition over the mesh.
    """

    def __init__(
        self,
        serialized: bytes,
        mesh: Mesh,
        outputs: Sequence[tuple[tuple[int, ...], PartitionSpec]],
    ) -> None:
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._outputs = [(shape, NamedSharding(mesh, spec)) for shape, spec in outputs]
        devices = tuple(mesh.devices.flat)
        client: Any = devices[0].client
        convert: Any = xla_client._xla.mlir  # pyright: ignore[reportPrivateImportUsage]
        self._program = client.compile_and_load(
            convert.hlo_to_stablehlo(serialized),  # XLA's verifier reads it here
            xla_client.DeviceList(devices),
            _options([device.id for device in devices]),
        )

    def __call__(self, *arguments: Any) -> tuple[jax.Array, ...]:
        """As the jitted function: whole arrays in, whole arrays out; NumPy arrays go to all."""
        placed = [
            jax.device_put(leaf, self._whole) if isinstance(leaf, np.ndarray) else leaf
            for leaf in jax.tree.leaves(arguments)
        ]
        results = self._program.execute_sharded(placed).disassemble_into_single_device_arrays()
        return tuple(
            jax.make_array_from_single_device_arrays(shape, sharding, pieces)
            for pieces, (shape, sharding) in zip(results, self._outputs, strict=True)
        )


def _options(device_ids: Sequence[int]) -> Any:
    """One replica on each device, and nothing to partition."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for settings in (options, build):
        settings.num_replicas, settings.num_partitions = len(device_ids), 1
    build.use_spmd_partitioning = False
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.asarray(device_ids).reshape(-1, 1)
    )
    return options


class _HloRunner(Runner):
    """A runner whose steps are the bytes that neuronx-cc is given."""

    def compile_step(
        self, step: Callable[..., Any], arguments: tuple, name: str
    ) -> Callable[..., Any]:
        results = jax.eval_shape(step, *arguments)
        num_parameters = len(jax.tree.leaves(arguments[0]))
        num_pools = len(jax.tree.leaves(results[0]))
        aliases = {pool: num_parameters + pool for pool in range(num_pools)}
        module = lower(step, arguments, name="step", aliases=aliases)
        specs = (STEP_OUTPUTS[0],) * num_pools + STEP_OUTPUTS[1:]
        shapes = [output.shape for output in jax.tree.leaves(results)]
        run = CpuProgram(to_bytes(module), self.mesh, list(zip(shapes, specs, strict=True)))
        tree = jax.tree.structure(results)
        return lambda *inputs: jax.tree.unflatten(tree, run(*inputs))


class HloEngine(Engine):
    """An engine on CPU devices that runs the programs for Neuron themselves.

    Its settings are those of an engine with ``step_form="static"`` or ``"unrolled"``.
    """

    runner_type = _HloRunner
