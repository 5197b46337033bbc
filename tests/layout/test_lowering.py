"""What the compiled step pays: unsigned positions need no handling of signs."""

import functools
import re

import jax
import numpy as np
import pytest

from dcpjax.layout import global_position, local_filled, local_index, owner, window_rows

SPLIT = {"ranks": 3, "interleave": 5}  # no powers of two, whose divisions become shifts
SIGN_HANDLING = {"compare", "select", "sign", "negate", "abs"}


def compiled_operations(function, dtype, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return set(re.findall(r"= \w+\[[\d,]*\](?:\{[\d,]*\})? ([\w-]+)\(", text))


def test_an_owner_is_a_division_and_a_remainder():
    operations = compiled_operations(functools.partial(owner, **SPLIT), np.uint32, (64,))
    assert operations - {"parameter", "constant", "broadcast", "fusion", "call"} == {
        "divide",
        "remainder",
    }


@pytest.mark.parametrize("function", [local_index, global_position, local_filled])
def test_unsigned_functions_handle_no_signs(function):
    shapes = ((64,),) if function is local_index else ((64,), ())
    operations = compiled_operations(functools.partial(function, **SPLIT), np.uint32, *shapes)
    assert "divide" in operations and not operations & SIGN_HANDLING


def test_unsigned_windows_handle_no_signs_and_do_not_sort():
    def rows(start, rank):
        return window_rows(start, 30, rank, **SPLIT)

    operations = compiled_operations(rows, np.uint32, (), ())
    assert "iota" in operations and not operations & {*SIGN_HANDLING, "sort"}


def test_signed_functions_do_handle_signs():
    operations = compiled_operations(functools.partial(owner, **SPLIT), np.int32, (64,))
    assert operations & SIGN_HANDLING, "so the tests above can fail"
