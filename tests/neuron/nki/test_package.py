"""The package without NKI: it imports, kernels say what is missing, wrong shapes are refused."""

import inspect
import subprocess
import sys

import jax.numpy as jnp
import pytest

from dcpjax.errors import DcpjaxError
from neuron.nki import PAIRS, NkiMissingError, NkiShapeError, context_attention, decode_attention

SPLIT = {"ranks": 2, "interleave": 1, "scale": 0.5}


def segment(*, tokens=1, heads=4, kv_heads=2, width=8, value_width=8, row=16, entries=2, **types):
    """Arguments of ``context_attention`` that are as they should be, but for what is given."""
    dtype = types.get("dtype", jnp.float32)
    return (
        jnp.zeros((tokens, heads, width), dtype),
        jnp.zeros((3, kv_heads, 4, row), types.get("pool", jnp.float32)),
        jnp.zeros(entries, jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.zeros((tokens, kv_heads, width), dtype),
        jnp.zeros((tokens, kv_heads, value_width), dtype),
        jnp.zeros(tokens, jnp.int32),
        0,
    )


def batch(**changes):
    """The same for ``decode_attention``."""
    q, pages, table, length, k, v, positions, rank = segment(**changes)
    return (q[None], pages, table[None], length[None], k[None], v[None], positions[None], rank)


def test_importing_needs_no_nki():
    program = "import sys, neuron.nki; assert 'nki' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def nki_is_absent(monkeypatch):
    for name in ("nki", "nki.isa", "nki.language"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", PAIRS)
def test_a_kernel_without_nki_says_what_to_install(name, monkeypatch):
    nki_is_absent(monkeypatch)
    arguments = {
        "decode": lambda: decode_attention(*batch(), **SPLIT),
        "context": lambda: context_attention(*segment(), **SPLIT),
        "merge": lambda: PAIRS["merge"].kernel(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))),
    }
    with pytest.raises(NkiMissingError, match=r"pip install nki.*nki 0\.6") as caught:
        arguments[name]()
    assert isinstance(caught.value, DcpjaxError)


@pytest.mark.parametrize("name", PAIRS)
def test_a_kernel_has_the_parameters_of_its_reference(name):
    pair = PAIRS[name]
    kernel, reference = (inspect.signature(f).parameters for f in (pair.kernel, pair.reference))
    assert [p for p in kernel if p != "lnc"] == list(reference)
    assert kernel["lnc"].default == 1


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"heads": 5}, "KV heads divide"),
        ({"row": 24}, "a pool's row is a key"),
        ({"value_width": 640, "row": 648}, "PSUM bank"),
        ({"entries": 2**21}, "exact in float32"),
        ({"dtype": jnp.bfloat16}, "of one type"),
        ({"pool": jnp.uint16}, "of one type"),
        ({"tokens": 60_000}, "shorten the chunk"),
    ],
)
def test_shapes_that_no_kernel_has_are_refused(changes, rule):
    with pytest.raises(NkiShapeError, match=rule):
        context_attention(*segment(**changes), **SPLIT)


def test_decode_is_for_few_queries():
    with pytest.raises(NkiShapeError, match=r"use context_attention \(rows=130, partitions=128\)"):
        decode_attention(*batch(tokens=65), **SPLIT)
