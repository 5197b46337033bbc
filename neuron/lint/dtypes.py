"""Rules about types, and about what integers may be used for."""

from collections.abc import Callable, Iterator
from typing import Any

from neuron.hlo import DTYPES, ElementType
from neuron.lint.graph import Instruction, is_float, is_integer, leaves, type_name
from neuron.lint.model import Context, Found, Rule
from neuron.lint.reductions import combiner_of, is_choosing

_CODES = "Neuron SDK, compiler/error-codes"
_WIDE = {ElementType.F64, ElementType.S64, ElementType.U64}
_COMPLEX = {ElementType.C64, ElementType.C128}
_FNUZ = {ElementType.F8E4M3B11FNUZ, ElementType.F8E5M2FNUZ, ElementType.F8E4M3FNUZ}
_TARGETS_FP8 = {ElementType.F8E4M3FN, ElementType.F8E4M3}
_LISTED = {
    ElementType.PRED,
    ElementType.S8,
    ElementType.U8,
    ElementType.S16,
    ElementType.S32,
    ElementType.U32,
    ElementType.F16,
    ElementType.BF16,
    ElementType.F32,
    ElementType.F8E5M2,
    ElementType.TUPLE,
    ElementType.TOKEN,
}
EXACT_IN_FLOAT32 = 2**24


def _types(*types: ElementType) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        for instruction, shape in _arrays(context):
            if shape.element_type in types:
                yield instruction, {"dtype": type_name(shape)}

    return find


def _arrays(context: Context) -> Iterator[tuple[Instruction, Any]]:
    """Each instruction with the shape of the array that it makes, or of each of them.

    What only hands tuples on is left out: the types are those of who made the arrays.
    """
    for instruction in context.graph:
        if instruction.opcode in ("tuple", "get-tuple-element", "while", "opt-barrier"):
            continue
        yield from ((instruction, leaf) for leaf in leaves(instruction.shape))


def _foreign_fp8(fp8: ElementType) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        if DTYPES[fp8] in context.target.fp8:
            return
        for instruction, found in _types(fp8)(context):
            yield instruction, {**found, "target": context.target.name}

    return find


def _unlisted(context: Context) -> Iterator[Found]:
    known = _LISTED | _WIDE | _COMPLEX | _FNUZ | _TARGETS_FP8
    for instruction, shape in _arrays(context):
        if shape.element_type not in known:
            yield instruction, {"dtype": type_name(shape)}


def _wide_constants(context: Context) -> Iterator[Found]:
    for i in context.graph.of("constant"):
        if i.shape.element_type == ElementType.U64:
            yield i, {"dtype": type_name(i.shape)}


def _integer_products(context: Context) -> Iterator[Found]:
    for i in context.graph.of("dot", "convolution"):
        types = [type_name(operand.shape) for operand in context.graph.operands(i)]
        if not all(is_float(operand.shape) for operand in context.graph.operands(i)):
            yield i, {"operands": types}


def _integer_collectives(*opcodes: str) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        for i in context.graph.of(*opcodes):
            operands = context.graph.operands(i)
            if not all(is_float(operand.shape) for operand in operands):
                yield i, {"operands": [type_name(operand.shape) for operand in operands]}

    return find


def _integer_scatters(context: Context) -> Iterator[Found]:
    for i in context.graph.of("scatter"):
        combiner = combiner_of(context.graph, i)
        is_plain = is_choosing(context.graph, i) and combiner is None
        if is_integer(i.shape) and not is_plain:
            yield i, {"dtype": type_name(i.shape), "combiner": combiner}


def _integer_reduces(*, exact: bool) -> Callable[[Context], Iterator[Found]]:
    def find(context: Context) -> Iterator[Found]:
        for i in context.graph.of("reduce"):
            kinds = [type_name(leaf) for leaf in leaves(i.shape) if is_integer(leaf)]
            if kinds and _is_exact(context, i) == exact:
                yield i, {"dtype": kinds[0], "combiner": combiner_of(context.graph, i)}

    return find


def _is_exact(context: Context, reduce: Instruction) -> bool:
    """Whether elements and result are integers that float32 has, whatever the order."""
    parts = [reduce, *context.graph.operands(reduce)]
    for part in parts:
        for interval in context.ranges.all_of(part):
            if max(map(abs, interval.bounds)) > EXACT_IN_FLOAT32:
                return False
    return combiner_of(context.graph, reduce) != "multiply"


RULES = (
    Rule(
        "no-64-bit",
        "no type has 64 bits",
        "NCC_ESPP004; values cut to 32 bits (--implicit-integer-downcast)",
        "Neuron SDK, compiler/neuronx-cc/api-reference-guide",
        _types(*_WIDE),
    ),
    Rule("u64-constant", "no constant is u64", "NCC_ESFH002", _CODES, _wide_constants),
    Rule("no-complex", "no type is complex", "NCC_EVRF004", _CODES, _types(*_COMPLEX)),
    Rule("no-fnuz", "no 8-bit float is of the fnuz kind", "NCC_EVRF005", _CODES, _types(*_FNUZ)),
    Rule(
        "e4m3fn",
        "float8_e4m3fn is a type of trn3 alone",
        "NCC_EVRF051",
        _CODES,
        _foreign_fp8(ElementType.F8E4M3FN),
    ),
    Rule(
        "e4m3",
        "float8_e4m3 is a type of targets before trn3",
        "NCC_EVRF052",
        _CODES,
        _foreign_fp8(ElementType.F8E4M3),
    ),
    Rule(
        "listed-dtypes",
        "types are those that Neuron lists",
        "NCC_ESPP004, NCC_ESPP047",
        _CODES,
        _unlisted,
    ),
    Rule(
        "float-products",
        "matrix products are of floats",
        "NCC_EVRF035",
        _CODES,
        _integer_products,
    ),
    Rule(
        "float-all-reduce",
        "an all-reduce is of floats",
        "NCC_EVRF061",
        _CODES,
        _integer_collectives("all-reduce", "all-reduce-start"),
    ),
    Rule(
        "float-reduce-scatter",
        "a reduce-scatter is of floats",
        "NCC_EVRF063",
        _CODES,
        _integer_collectives("reduce-scatter"),
    ),
    Rule(
        "integer-scatter",
        "a scatter of integers replaces elements and combines none",
        "NCC_EVRF016, NCC_EVRF060",
        _CODES,
        _integer_scatters,
    ),
    Rule(
        "integer-reduce",
        "a reduction of integers is exact in float32, by the ranges of its inputs",
        "wrong results above 2**24, as for NCC_EVRF016",
        _CODES,
        _integer_reduces(exact=False),
    ),
    Rule(
        "small-integer-reduce",
        "reductions are of floats, also where integers would be exact",
        "a conversion to float32 and back",
        _CODES,
        _integer_reduces(exact=True),
        "warning",
    ),
)
