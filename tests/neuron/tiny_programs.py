"""Programs of a few instructions, where a program's content does not matter."""

from neuron.hlo import Module
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec

INPUTS = (
    TensorSpec("pool", (4, 2), "bfloat16"),
    TensorSpec("token_ids", (3,), "int32", (IndexRange(0, 2, 5, 9),)),
    TensorSpec("rank_ids", (1, 1), "uint32", (IndexRange(0, 1, 0, 1),)),
)
OUTPUTS = (TensorSpec("pool", (4, 2), "bfloat16"), TensorSpec("tokens", (3,), "int32"))


def program(
    name: str, kind: ProgramKind = "decode", *, order: str = "pass", num_ranks: int = 2
) -> Program:
    """A program whose first output is its first input; ``order`` is for the fake compiler."""
    module = Module(name=f"{name} order={order};", entry_computation_id=1)
    computation = module.computations.add(name="main", id=1, root_id=4)
    for number in range(len(INPUTS)):
        computation.instructions.add(
            name=f"p{number}", opcode="parameter", id=number + 1, parameter_number=number
        )
    computation.instructions.add(name="out", opcode="tuple", id=4, operand_ids=[1, 2])
    module.input_output_alias.entries.add(output_shape_index=[0], parameter_number=0, kind=1)
    return Program(name, kind, num_ranks, module, INPUTS, OUTPUTS)
