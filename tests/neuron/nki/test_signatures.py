"""Every NKI call in the kernels against the published signatures, read from the kernels' source."""

import ast
import inspect
import json
from pathlib import Path

import pytest

import neuron.nki
from tests.neuron.nki.emulated_memory import Tensor

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text())
CALLS, NAMES = RECORDED["calls"], set(RECORDED["names"])
KERNELS = sorted((Path(neuron.nki.__file__).parent / "kernels").glob("*.py"))
MODULES = {"nl": "nki.language", "nisa": "nki.isa", "nki": "nki"}


def dotted(node: ast.expr) -> str | None:
    """``nisa.engine.tensor`` as ``nki.isa.engine.tensor``; None for what is not NKI's."""
    if isinstance(node, ast.Name):
        return MODULES.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return None


def mistakes_of_call(name: str, call: ast.Call) -> list[str]:
    """What of a call does not fit the recorded parameters."""
    names = [parameter.rstrip("=") for parameter in CALLS[name]]
    required = {parameter for parameter in CALLS[name] if not parameter.endswith("=")}
    given = [*names[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
    mistakes = [f"{name}: no parameter {one}" for one in given if one not in names]
    mistakes += [f"{name}: {one} is given twice" for one in set(given) if given.count(one) > 1]
    mistakes += [f"{name}: {one} is missing" for one in sorted(required - set(given))]
    if len(call.args) > len(names):
        mistakes.append(f"{name}: {len(call.args)} positional arguments")
    return mistakes


def mistakes(source: str) -> list[str]:
    """Calls and names of NKI in a module that are not as published."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = dotted(node.func) or f"NkiTensor.{node.func.attr}"
            if name in CALLS:
                found += mistakes_of_call(name, node)
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        is_prefix = any(known.startswith(f"{name}.") for known in [*NAMES, *CALLS])
        if name and name not in NAMES and name not in CALLS and name != "nki.jit" and not is_prefix:
            found.append(f"{name} is not recorded")
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_call_what_is_published(path):
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nisa.memset(tile)", "value is missing"),
        ("nisa.memset(dst=tile, value=0, fill=1)", "no parameter fill"),
        ("nisa.memset(tile, 0, dst=tile)", "dst is given twice"),
        ("nisa.memset(tile, 0, None, None, None)", "5 positional"),
        ("pool.vector_select(0)", "vector_offset is missing"),
        ("nisa.softmax(tile)", "nki.isa.softmax is not recorded"),
        ("nisa.activation(dst=a, op=nl.exp2, data=b)", "nki.language.exp2 is not recorded"),
        ("nisa.reduce_cmd.begin", "nki.isa.reduce_cmd.begin is not recorded"),
    ],
)
def test_a_planted_mistake_is_found(source, expected):
    (mistake,) = mistakes(source)
    assert expected in mistake


def test_every_recorded_call_is_used():
    used = "\n".join(path.read_text() for path in KERNELS)
    calls = [name.split(".")[-1] for name in CALLS]
    assert [call for call in calls if f".{call}(" not in used] == []


def parameters_of(function) -> list[str]:
    """Parameters as the table writes them."""
    parameters = inspect.signature(function).parameters.values()
    return [f"{p.name}=" if p.default is not p.empty else p.name for p in parameters if p.name]


def signatures_of(isa, language, tensor) -> dict[str, list[str]]:
    """The recorded calls as these modules have them."""
    owners = {"nki.isa": isa, "nki.language": language, "NkiTensor": tensor}
    split = {name: name.rsplit(".", 1) for name in CALLS}
    return {
        name: [p for p in parameters_of(getattr(owners[owner], call)) if p != "self"]
        for name, (owner, call) in split.items()
    }


def test_the_emulation_has_the_published_signatures(emulated):
    import nki.isa
    import nki.language

    assert signatures_of(nki.isa, nki.language, Tensor) == CALLS


def test_the_real_package_has_the_published_signatures():
    """Runs only where the Neuron SDK is: then the table is compared with what is installed."""
    isa = pytest.importorskip("nki.isa", reason="needs AWS's nki", exc_type=ImportError)
    language = pytest.importorskip("nki.language", reason="needs AWS's nki", exc_type=ImportError)
    assert signatures_of(isa, language, language.NkiTensor) == CALLS
