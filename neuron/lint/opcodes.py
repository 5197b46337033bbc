"""Rules about which operations there are."""

from collections.abc import Callable, Iterator

from neuron.hlo import ElementType
from neuron.lint.graph import Graph, Instruction, element_bits, is_float, is_integer, type_name
from neuron.lint.model import Context, Found, Rule

_CODES = "Neuron SDK, compiler/error-codes"
_JAX_ISSUES = "Neuron SDK, frameworks/jax/setup/jax-neuronx-known-issues"

_AWS_NEURON = """
ArgMax ArgMin CollectiveMatmul CustomNativeKernel CustomOp DevicePrint DropoutMaskV1 Erf Gelu
GeluApprxTanh GeluBackward IntMatmult LNCShardingConstraint ModuleMarkerEnd-Backward
ModuleMarkerEnd-Forward ModuleMarkerStart-Backward ModuleMarkerStart-Forward RmsNorm Silu
SiluBackward Softmax SoftmaxBackward TopK TransferWithStaticRing
"""
_OTHERS = """
NeuronBoundaryMarker-Start NeuronBoundaryMarker-End ResizeNearest ResizeBilinear ResizeNearestGrad
"""
CUSTOM_CALLS = frozenset([*(f"AwsNeuron{name}" for name in _AWS_NEURON.split()), *_OTHERS.split()])
"""Targets of custom calls that the compiler knows (EHCA005)."""
TRN3_CUSTOM_CALLS = frozenset(["QuantizeMX", "__op$block_scaled_dot"])
MAX_TOP_K = 16384
RNG_DEFAULT = 0
_NOT_COMPUTED = {"parameter", "constant", "tuple", "get-tuple-element"}
_ORDERS = ("LT", "LE", "GT", "GE")


def _opcodes(*opcodes: str) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        return ((i, {"opcode": i.opcode}) for i in context.graph.of(*opcodes))

    return find


def _unknown_custom_calls(context: Context) -> Iterator[Found]:
    allowed = CUSTOM_CALLS | (TRN3_CUSTOM_CALLS if context.target.name == "trn3" else frozenset())
    for i in context.graph.of("custom-call"):
        if i.custom_call_target not in allowed:
            yield i, {"custom_call_target": i.custom_call_target}


def _top_k_calls(context: Context) -> Iterator[Instruction]:
    calls = context.graph.of("custom-call")
    return (i for i in calls if i.custom_call_target == "AwsNeuronTopK")


def _wide_top_k(context: Context) -> Iterator[Found]:
    for i in _top_k_calls(context):
        text = i.backend_config.decode(errors="replace")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_TOP_K:
            yield i, {"backend_config": text, "limit": MAX_TOP_K}


def _integer_top_k(context: Context) -> Iterator[Found]:
    for i in _top_k_calls(context):
        operand = context.graph.operands(i)[0]
        if not is_float(operand.shape):
            yield i, {"dtype": type_name(operand.shape)}


def _top_k_axis(context: Context) -> Iterator[Found]:
    """k elements of the last axis, all of the others."""
    for i in _top_k_calls(context):
        source = list(context.graph.operands(i)[0].shape.dimensions)
        results = [list(shape.dimensions) for shape in i.shape.tuple_shapes]
        wanted = [*source[:-1], int(i.backend_config)] if i.backend_config.isdigit() else None
        if wanted is not None and results != [wanted, wanted]:
            yield i, {"operand": source, "results": results, "expected": wanted}


def _other_comparators(context: Context) -> Iterator[Found]:
    for i in context.graph.of("sort"):
        root = context.graph.root(context.graph.called(i)[0])
        direction = root.comparison_direction if root.opcode == "compare" else root.opcode
        if direction not in _ORDERS:
            yield i, {"comparator": direction}


def _threefry(context: Context) -> Iterator[Found]:
    """Its mixing: an xor of a word with another one whose bits were rotated."""
    for i in context.graph.of("xor"):
        operands = context.graph.operands(i)
        if i.shape.element_type == ElementType.U32 and any(
            _is_rotation(context.graph, operand) for operand in operands
        ):
            yield i, {"dtype": type_name(i.shape)}


def _is_rotation(graph: Graph, instruction: Instruction) -> bool:
    if instruction.opcode != "or":
        return False
    parts = {part.opcode: part for part in graph.operands(instruction)}
    if set(parts) != {"shift-left", "shift-right-logical"}:
        return False
    left, right = parts["shift-left"], parts["shift-right-logical"]
    return left.operand_ids[0] == right.operand_ids[0]


def _other_algorithms(context: Context) -> Iterator[Found]:
    for i in context.graph.of("rng-bit-generator"):
        if i.rng_algorithm != RNG_DEFAULT:
            yield i, {"rng_algorithm": i.rng_algorithm}


def _narrow_shifts(context: Context) -> Iterator[Found]:
    for i in context.graph.of("shift-right-arithmetic"):
        if element_bits(i.shape) != 32:
            yield i, {"dtype": type_name(i.shape)}


def _variadic_reduces(context: Context) -> Iterator[Found]:
    for i in context.graph.of("reduce"):
        if len(i.operand_ids) > 2:
            yield i, {"operands": len(i.operand_ids)}


def _dilated_convolutions(context: Context) -> Iterator[Found]:
    for i in context.graph.of("convolution"):
        dilations = [(d.window_dilation, d.base_dilation) for d in i.window.dimensions]
        if any(dilation not in (0, 1) for pair in dilations for dilation in pair):
            yield i, {"dilations": dilations}


def _integer_powers(context: Context) -> Iterator[Found]:
    for i in context.graph.of("power"):
        if is_integer(i.shape) and element_bits(i.shape) == 64:
            yield i, {"dtype": type_name(i.shape)}


def _unlisted(context: Context) -> Iterator[Found]:
    if context.operators is None:
        return
    for i in context.graph:
        if i.opcode not in context.operators | _NOT_COMPUTED:
            yield i, {"opcode": i.opcode}


RULES = (
    Rule(
        "custom-call-target",
        "custom calls are among those that the compiler knows",
        "NCC_EHCA005, NCC_EVRF015",
        _CODES,
        _unknown_custom_calls,
    ),
    Rule(
        "top-k-size",
        f"AwsNeuronTopK takes from 1 to {MAX_TOP_K} elements, written in backend_config",
        "NCC_EVRF014",
        _CODES,
        _wide_top_k,
    ),
    Rule("top-k-dtype", "AwsNeuronTopK orders floats", "NCC_EVRF013", _CODES, _integer_top_k),
    Rule(
        "top-k-axis",
        "AwsNeuronTopK takes k elements of the last axis, and gives values and indices",
        "NCC_EHCA005",
        "Neuron SDK, compiler/error-codes; the compiler's own rewriting of sort and slice",
        _top_k_axis,
    ),
    Rule(
        "no-top-k",
        "there is no topk: use AwsNeuronTopK or thresholds",
        "NCC_EVRF001",
        _CODES,
        _opcodes("topk"),
    ),
    Rule(
        "sort-comparator",
        "a sort compares by LT, LE, GT or GE",
        "NCC_EVRF001",
        _JAX_ISSUES,
        _other_comparators,
    ),
    Rule(
        "no-conditional",
        "there is no conditional: compute both branches and select",
        "NCC_EVRF001, NCC_EUOC002",
        _JAX_ISSUES,
        _opcodes("conditional"),
    ),
    Rule(
        "no-host",
        "nothing is exchanged with the host or with single ranks inside a program",
        "NCC_EVRF001; NRT_INVALID in nrt_load",
        _JAX_ISSUES,
        _opcodes(
            "infeed", "outfeed", "send", "send-done", "recv", "recv-done", "after-all", "domain"
        ),
    ),
    Rule(
        "no-threefry",
        "random numbers are not threefry's: draw them on the host",
        "wrong random numbers",
        _JAX_ISSUES,
        _threefry,
    ),
    Rule(
        "no-rng",
        "there is no stateful random number generator",
        "NCC_EVRF001",
        _JAX_ISSUES,
        _opcodes("rng", "rng-get-and-update-state"),
    ),
    Rule(
        "rng-algorithm",
        "RngBitGenerator's algorithm is RNG_DEFAULT",
        "NCC_EVRF006",
        _CODES,
        _other_algorithms,
    ),
    Rule(
        "no-reduce-precision",
        "there is no reduce-precision",
        "NCC_EVRF001",
        _JAX_ISSUES,
        _opcodes("reduce-precision"),
    ),
    Rule(
        "no-rank-id",
        "the rank is an input, so that one program serves all ranks",
        "NCC_EVRF001 in programs of one core; a program for each rank",
        "Neuron SDK, frameworks/jax",
        _opcodes("partition-id", "replica-id"),
    ),
    Rule(
        "no-fft",
        "there is no FFT",
        "NCC_EVRF001, NCC_EVRF004",
        _CODES,
        _opcodes("fft"),
    ),
    Rule(
        "no-linear-algebra",
        "there are no decompositions",
        "NCC_EVRF001",
        _CODES,
        _opcodes("cholesky", "triangular-solve"),
    ),
    Rule(
        "no-calls",
        "calls are inlined",
        "NCC_EVRF001",
        "post-partitioner HLO as the plugin compiles it",
        _opcodes("call", "async-start", "async-update", "async-done"),
    ),
    Rule(
        "no-reduce-window",
        "there is no reduce-window (cumsum): multiply by a triangle or compute on the host",
        "wrong results or a crash; NCC_EVRF017, NCC_EVRF018, NCC_EVRF019",
        "aws-neuron-sdk issues 767 and 778",
        _opcodes("reduce-window", "select-and-scatter"),
    ),
    Rule(
        "arithmetic-shift",
        "only 32-bit integers are shifted arithmetically",
        "NCC_EVRF022",
        _CODES,
        _narrow_shifts,
    ),
    Rule(
        "convolution-dilation",
        "convolutions have no dilation",
        "NCC_EVRF010, NCC_EVRF011",
        _CODES,
        _dilated_convolutions,
    ),
    Rule("integer-power", "64-bit integers are not raised", "NCC_EVRF062", _CODES, _integer_powers),
    Rule(
        "variadic-reduce",
        "a reduction has one operand: an argmax is a maximum, and a minimum of places",
        "NCC_EVRF001 with some compilers",
        _JAX_ISSUES,
        _variadic_reduces,
        "warning",
    ),
    Rule(
        "operator-list",
        "the installed compiler lists every opcode",
        "NCC_EVRF001, NCC_EUOC002",
        "neuronx-cc list-operators --framework XLA",
        _unlisted,
    ),
)
