"""HLO modules as protobuf messages, with just the fields that are read or changed here.

Everything else in a file is kept as it is: protobuf carries unknown fields along. Field names and
numbers are those of XLA's ``hlo.proto`` and ``xla_data.proto``; the messages are built at import,
so neither protoc nor generated code is needed.
"""

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "dcpjax_hlo"
_Field = descriptor_pb2.FieldDescriptorProto

_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    # name: {field: (number, type)}; "[]" marks a repeated field
    "Layout": {"minor_to_major": (1, "int64[]")},
    "Shape": {
        "element_type": (2, "int32"),
        "dimensions": (3, "int64[]"),
        "tuple_shapes": (4, "Shape[]"),
        "layout": (5, "Layout"),
        "is_dynamic_dimension": (6, "bool[]"),
    },
    "ProgramShape": {
        "parameters": (1, "Shape[]"),
        "result": (2, "Shape"),
        "parameter_names": (3, "string[]"),
    },
    "Literal": {
        "shape": (1, "Shape"),
        "preds": (2, "bool[]"),
        "u8s": (3, "bytes"),
        "s32s": (4, "int32[]"),
        "s64s": (5, "int64[]"),
        "u32s": (6, "uint32[]"),
        "u64s": (7, "uint64[]"),
        "f32s": (8, "float[]"),
        "f64s": (9, "double[]"),
        "tuple_literals": (10, "Literal[]"),
        "f16s": (11, "bytes"),
        "bf16s": (13, "bytes"),
        "s8s": (15, "bytes"),
        "u16s": (16, "bytes"),
        "s16s": (17, "bytes"),
    },
    "Metadata": {
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
        "stack_frame_id": (15, "int32"),
    },
    "SliceDimensions": {"start": (1, "int64"), "limit": (2, "int64"), "stride": (3, "int64")},
    "PaddingDimension": {
        "edge_padding_low": (1, "int64"),
        "edge_padding_high": (2, "int64"),
        "interior_padding": (3, "int64"),
    },
    "Padding": {"dimensions": (1, "PaddingDimension[]")},
    "WindowDimension": {
        "size": (1, "int64"),
        "stride": (2, "int64"),
        "padding_low": (3, "int64"),
        "padding_high": (4, "int64"),
        "window_dilation": (5, "int64"),
        "base_dilation": (6, "int64"),
    },
    "Window": {"dimensions": (1, "WindowDimension[]")},
    "DotDimensions": {
        "lhs_contracting": (1, "int64[]"),
        "rhs_contracting": (2, "int64[]"),
        "lhs_batch": (3, "int64[]"),
        "rhs_batch": (4, "int64[]"),
    },
    "GatherDimensions": {
        "offset_dims": (1, "int64[]"),
        "collapsed_slice_dims": (2, "int64[]"),
        "start_index_map": (3, "int64[]"),
        "index_vector_dim": (4, "int64"),
        "operand_batching_dims": (5, "int64[]"),
        "start_indices_batching_dims": (6, "int64[]"),
    },
    "ScatterDimensions": {
        "update_window_dims": (1, "int64[]"),
        "inserted_window_dims": (2, "int64[]"),
        "scatter_dims_to_operand_dims": (3, "int64[]"),
        "index_vector_dim": (4, "int64"),
        "input_batching_dims": (5, "int64[]"),
        "scatter_indices_batching_dims": (6, "int64[]"),
    },
    "ReplicaGroup": {"replica_ids": (1, "int64[]")},
    "IotaGroups": {
        "num_replica_groups": (1, "int64"),
        "num_devices_per_group": (2, "int64"),
        "iota_reshape_dims": (3, "int64[]"),
        "iota_transpose_perm": (4, "int32[]"),
    },
    "MeshAxis": {"name": (1, "string"), "size": (2, "int64")},
    "Mesh": {"axes": (1, "MeshAxis[]"), "device_ids": (2, "int64[]")},
    "SubAxis": {"pre_size": (1, "int64"), "size": (2, "int64")},
    "AxisRef": {"mesh_axis_index": (1, "int64"), "sub_axis_info": (2, "SubAxis")},
    "MeshGroups": {"mesh": (1, "Mesh"), "axes": (2, "AxisRef[]")},
    "DeviceList": {
        "replica_groups": (1, "ReplicaGroup[]"),
        "iota_replica_group_list": (2, "IotaGroups"),
    },
    "SourceTarget": {"source": (1, "int64"), "target": (2, "int64")},
    "StringPair": {"key": (1, "string"), "value": (2, "string")},
    "FrontendAttributes": {"map": (1, "StringPair[]")},
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "Shape"),
        "metadata": (7, "Metadata"),
        "literal": (8, "Literal"),
        "parameter_number": (9, "int64"),
        "tuple_index": (13, "int64"),
        "dimensions": (14, "int64[]"),
        "window": (15, "Window"),
        "slice_dimensions": (17, "SliceDimensions[]"),
        "dynamic_slice_sizes": (20, "int64[]"),
        "padding_config": (21, "Padding"),
        "channel_id": (26, "int64"),
        "custom_call_target": (28, "string"),
        "dot_dimension_numbers": (30, "DotDimensions"),
        "gather_dimension_numbers": (33, "GatherDimensions"),
        "gather_slice_sizes": (34, "int64[]"),
        "id": (35, "int64"),
        "operand_ids": (36, "int64[]"),
        "control_predecessor_ids": (37, "int64[]"),
        "called_computation_ids": (38, "int64[]"),
        "sharding": (40, "Opaque"),
        "backend_config": (43, "bytes"),
        "scatter_dimension_numbers": (48, "ScatterDimensions"),
        "replica_groups": (49, "ReplicaGroup[]"),
        "source_target_pairs": (52, "SourceTarget[]"),
        "comparison_direction": (63, "string"),
        "frontend_attributes": (68, "FrontendAttributes"),
        "rng_algorithm": (70, "int32"),
        "use_global_device_ids": (71, "bool"),
        "collective_device_list": (87, "DeviceList"),
        "original_value": (88, "Opaque"),
        "mesh_axes_replica_group_list": (93, "MeshGroups"),
    },
    "Opaque": {},
    "Computation": {
        "name": (1, "string"),
        "instructions": (2, "Instruction[]"),
        "program_shape": (4, "ProgramShape"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
    },
    "AliasEntry": {
        "output_shape_index": (1, "int64[]"),
        "parameter_number": (2, "int64"),
        "parameter_shape_index": (3, "int64[]"),
        "kind": (4, "int32"),
    },
    "InputOutputAlias": {"entries": (1, "AliasEntry[]")},
    "FileLocation": {
        "file_name_id": (1, "int32"),
        "function_name_id": (2, "int32"),
        "line": (3, "int32"),
        "column": (4, "int32"),
    },
    "StackFrame": {"file_location_id": (1, "int32"), "parent_frame_id": (2, "int32")},
    "StackFrames": {
        "file_names": (1, "string[]"),
        "function_names": (2, "string[]"),
        "file_locations": (3, "FileLocation[]"),
        "stack_frames": (4, "StackFrame[]"),
    },
    "Module": {
        "name": (1, "string"),
        "entry_computation_name": (2, "string"),
        "computations": (3, "Computation[]"),
        "host_program_shape": (4, "ProgramShape"),
        "id": (5, "int64"),
        "entry_computation_id": (6, "int64"),
        "input_output_alias": (8, "InputOutputAlias"),
        "is_dynamic": (11, "bool"),
        "spmd_output_sharding": (12, "Opaque"),
        "spmd_parameters_shardings": (14, "Opaque[]"),
        "device_assignment": (15, "Opaque"),
        "stack_frame_index": (17, "StackFrames"),
        "buffer_donor": (18, "Opaque"),
        "frontend_attributes": (19, "FrontendAttributes"),
    },
    "File": {"hlo_module": (1, "Module")},  # XLA's HloProto: what --xla_dump_hlo_as_proto writes
}


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            _add_field(message, field_name, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(kind) for name, kind in found.items()}


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    label = _Field.LABEL_REPEATED if kind.endswith("[]") else _Field.LABEL_OPTIONAL
    kind = kind.removesuffix("[]")
    field = message.field.add(name=name, number=number, label=label)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


_CLASSES = _build()
Module: Any = _CLASSES["Module"]
"""XLA's HloModuleProto."""
File: Any = _CLASSES["File"]
"""XLA's HloProto."""


class ElementType(IntEnum):
    """XLA's primitive types, as ``Shape.element_type`` has them."""

    INVALID = 0
    PRED = 1
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    TUPLE = 13
    OPAQUE = 14
    C64 = 15
    BF16 = 16
    TOKEN = 17
    C128 = 18
    F8E5M2 = 19
    F8E4M3FN = 20
    S4 = 21
    U4 = 22
    F8E4M3B11FNUZ = 23
    F8E5M2FNUZ = 24
    F8E4M3FNUZ = 25
    S2 = 26
    U2 = 27
    F8E4M3 = 28
    F8E3M4 = 29
    S1 = 30
    U1 = 31
    F4E2M1FN = 32
    F8E8M0FNU = 33
    BUFFER = 34


DTYPES = {
    ElementType.PRED: "bool",
    ElementType.S8: "int8",
    ElementType.S16: "int16",
    ElementType.S32: "int32",
    ElementType.S64: "int64",
    ElementType.U8: "uint8",
    ElementType.U16: "uint16",
    ElementType.U32: "uint32",
    ElementType.U64: "uint64",
    ElementType.F16: "float16",
    ElementType.BF16: "bfloat16",
    ElementType.F32: "float32",
    ElementType.F64: "float64",
    ElementType.C64: "complex64",
    ElementType.C128: "complex128",
    ElementType.F8E5M2: "float8_e5m2",
    ElementType.F8E4M3: "float8_e4m3",
    ElementType.F8E4M3FN: "float8_e4m3fn",
}
"""NumPy's (ml_dtypes') names of the types that a program of ours may have."""


def dtype_name(shape: Any) -> str:
    """NumPy's name of an array shape's type."""
    return DTYPES[ElementType(shape.element_type)]


def entry(module: Any) -> Any:
    """The entry computation."""
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def root(computation: Any) -> Any:
    """The instruction whose value a computation returns."""
    return next(i for i in computation.instructions if i.id == computation.root_id)
