"""From a ``shard_map`` over a mesh to the program of one rank, without the devices.

A mesh axis is manual inside ``shard_map``: its body already is the program of a rank, collectives
and groups included. It is taken out of the lowered module before any partitioner has run, so
neither the ranks' devices nor a compilation are needed, and all ranks have one program by
construction. (``tests/neuron/test_lowering.py`` compares it with what XLA's partitioner makes.)
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import jax

# The conversion from StableHLO to HLO has no public name; `compiler_ir("hlo")` is the same call.
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, AxisType
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from neuron.errors import LoweringError
from neuron.normalise import normalise

_PARTITIONS = "mhlo.num_partitions"


def abstract_mesh(shape: dict[str, int]) -> AbstractMesh:
    """A mesh of so many ranks along each axis, without devices."""
    names, sizes = tuple(shape), tuple(shape.values())
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def lower(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    name: str,
    aliases: dict[int, int],
) -> Any:
    """The normalised HloModuleProto of one rank.

    Args:
        function: one ``jax.shard_map`` over all axes of its mesh.
        arguments: pytrees of jax.ShapeDtypeStruct with shardings over that mesh.
        aliases: {flat output: flat input} that share memory.

    Raises:
        LoweringError: it is anything else than one ``shard_map``.
    """
    traced = jax.jit(function, keep_unused=True).trace(*arguments)
    lowered: Any = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    with lowered.context, ir.Location.unknown():
        module = ir.Module.parse(_bytecode(lowered))  # the other one is JAX's, which keeps it
        if _num_partitions(module) > 1:  # a lone rank's shard_map is inlined by JAX itself
            _replace_main(module)
        main: Any = next(op for op in module.body if _is_main(op))
        is_tuple = len(main.type.results) > 1
    return normalise(_to_hlo(module, is_tuple), name, aliases)


def _num_partitions(module: Any) -> int:
    return module.operation.attributes[_PARTITIONS].value


def _replace_main(module: Any) -> None:
    """Let the body of the ``shard_map`` be the whole of ``main``."""
    main = next(op for op in module.body if _is_main(op))
    body, constants = _manual_body(main)
    parameters = [argument for argument in body.arguments if argument.arg_number not in constants]
    kind = ir.FunctionType.get(
        [parameter.type for parameter in parameters],
        [operand.type for operand in body.operations[-1].operands],
    )
    with ir.InsertionPoint(main):
        local = func.FuncOp("main", kind, visibility="public")
    entry = local.add_entry_block()
    for inner, outer in zip(parameters, entry.arguments, strict=True):
        inner.replace_all_uses_with(outer)
    for number, constant in constants.items():
        body.arguments[number].replace_all_uses_with(constant.result)
        entry.append(constant)
    *operations, end = body.operations
    for operation in operations:
        entry.append(operation)
    with ir.InsertionPoint(entry):
        func.ReturnOp(list(end.operands))
    main.erase()
    module.operation.attributes[_PARTITIONS] = ir.IntegerAttr.get(
        ir.IntegerType.get_signless(32), 1
    )


def _is_main(operation: Any) -> bool:
    return isinstance(operation, func.FuncOp) and operation.name.value == "main"


def _manual_body(main: Any) -> tuple[Any, dict[int, Any]]:
    """The body, and the constants among its arguments: JAX takes them out of the body."""
    *constants, manual, end = (op.operation for op in main.entry_block)
    names = [op.name for op in constants]
    if manual.name != "sdy.manual_computation" or set(names) - {"stablehlo.constant"}:
        raise LoweringError(
            "a program is one shard_map over all ranks and nothing beside it",
            operations=[*names, manual.name],
        )
    if list(end.operands) != list(manual.results):
        raise LoweringError("a program returns the results of its shard_map as they are")
    body = manual.regions[0].blocks[0]
    found = {
        number: next(op for op in constants if op.result == operand)
        for number, operand in enumerate(manual.operands)
        if any(op.result == operand for op in constants)
    }
    if any(body.arguments[number].type != op.result.type for number, op in found.items()):
        raise LoweringError("a constant is the same on all ranks")
    return body, found


def _to_hlo(module: Any, is_tuple: bool) -> bytes:
    """Serialized HLO; a single result stands for itself, as XLA's way back to StableHLO has it."""
    convert: Any = xla_client._xla.mlir  # pyright: ignore[reportPrivateImportUsage]
    computation = convert.mlir_module_to_xla_computation(
        _bytecode(module), use_tuple_args=False, return_tuple=is_tuple
    )
    return computation.as_serialized_hlo_module_proto()


def _bytecode(module: Any) -> bytes:
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()
