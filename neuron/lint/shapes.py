"""Rules about sizes: of what is built in, of inputs and outputs, of loops."""

from collections.abc import Iterator

from neuron.hlo import DTYPES
from neuron.lint.graph import dimensions, leaves, num_bytes, shape_text
from neuron.lint.loops import find_trip
from neuron.lint.model import Context, Found, Rule

MAX_CONSTANT_BYTES = 2**20
MAX_PARAMETERS = 128


def _dynamic_shapes(context: Context) -> Iterator[Found]:
    if context.module.is_dynamic:
        yield None, {"is_dynamic": True}
    for i in context.graph:
        changes = i.opcode in ("set-dimension-size", "get-dimension-size", "dynamic-reshape")
        if changes or any(any(leaf.is_dynamic_dimension) for leaf in leaves(i.shape)):
            yield i, {"opcode": i.opcode, "shape": shape_text(i.shape)}


def _unknown_trips(context: Context) -> Iterator[Found]:
    for i in context.graph.of("while"):
        if find_trip(context.graph, i) is None:
            yield i, {"carries": len(i.shape.tuple_shapes)}


def _large_constants(context: Context) -> Iterator[Found]:
    for i in context.graph.of("constant"):
        if num_bytes(i.shape) >= MAX_CONSTANT_BYTES:
            size = num_bytes(i.shape)
            yield i, {"shape": shape_text(i.shape), "bytes": size, "limit": MAX_CONSTANT_BYTES}


def _many_parameters(context: Context) -> Iterator[Found]:
    count = len(context.graph.parameters)
    if count >= MAX_PARAMETERS:
        yield None, {"parameters": count, "limit": MAX_PARAMETERS}


def _undeclared_inputs(context: Context) -> Iterator[Found]:
    """Bounds of indices follow from the declared inputs, so they must be the program's."""
    parameters, specs = context.graph.parameters, context.program.inputs
    if len(parameters) != len(specs):
        yield None, {"parameters": len(parameters), "inputs": len(specs)}
        return
    for i, spec in zip(parameters, specs, strict=True):
        name = DTYPES.get(i.shape.element_type)
        if (dimensions(i.shape), name) != (spec.shape, spec.dtype):
            declared = f"{spec.dtype}{list(spec.shape)}"
            yield i, {"input": spec.name, "declared": declared, "shape": shape_text(i.shape)}


def _unequal_aliases(context: Context) -> Iterator[Found]:
    outputs, parameters = context.graph.outputs, context.graph.parameters
    for alias in context.module.input_output_alias.entries:
        output, parameter = tuple(alias.output_shape_index), alias.parameter_number
        found = {"output": output, "parameter": parameter}
        if output not in outputs or parameter >= len(parameters):
            yield None, found
            continue
        shapes = shape_text(outputs[output].shape), shape_text(parameters[parameter].shape)
        if shapes[0] != shapes[1]:
            yield parameters[parameter], {**found, "shapes": shapes}


def _shared_aliases(context: Context) -> Iterator[Found]:
    entries = context.module.input_output_alias.entries
    outputs = [tuple(alias.output_shape_index) for alias in entries]
    parameters = [alias.parameter_number for alias in entries]
    for name, used in (("output", outputs), ("parameter", parameters)):
        for twice in sorted({one for one in used if used.count(one) > 1}):
            yield None, {name: twice}


RULES = (
    Rule(
        "static-shapes",
        "all shapes are static",
        "NCC_EMOD025",
        "Neuron SDK, compiler/error-codes",
        _dynamic_shapes,
    ),
    Rule(
        "trip-count",
        "a loop's number of runs can be read off it as a constant",
        "NCC_EVRF001, NCC_EUOC002",
        "Neuron SDK, frameworks/jax/setup/jax-neuronx-known-issues",
        _unknown_trips,
    ),
    Rule(
        "constant-size",
        "constants are below 1 MiB: weights are inputs",
        "a failing compiler above 2 GB; NCC_EVRF009",
        "aws-neuron-sdk issues 819 and 987",
        _large_constants,
    ),
    Rule(
        "parameter-count",
        f"a program has fewer than {MAX_PARAMETERS} parameters: weights of layers are stacked",
        "dispatch that takes 50 times as long",
        "measured by a user on inf2",
        _many_parameters,
    ),
    Rule(
        "declared-inputs",
        "parameters are the declared inputs, in their order",
        "wrong bounds of indices, NRT_EXEC_OOB",
        "neuron.program",
        _undeclared_inputs,
    ),
    Rule(
        "alias-shape",
        "an output has the shape and type of the input that it shares memory with",
        "NCC_EVRF064",
        "Neuron SDK, compiler; XLA's verifier",
        _unequal_aliases,
    ),
    Rule(
        "alias-once",
        "an input or output shares memory with one other",
        "NCC_EVRF064",
        "Neuron SDK, compiler; XLA's verifier",
        _shared_aliases,
    ),
)
