"""The command: what it prints, and when it fails."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from jax import lax

from dcpjax.config import EngineConfig
from neuron.check import check, main
from neuron.compile import main as compile_main
from neuron.options import engine_config
from neuron.report import report
from neuron.targets import find_target
from tests.neuron.lint.programs import program, spec

F32 = np.float32
TRN2 = find_target("trn2")


def sliced(high):
    """Slices at 0 to ``high``, of which 5 is the last in range."""
    return program(
        lambda x, i: lax.dynamic_slice(x, (i,), (3,)), spec((8,), F32), spec((), np.int32, 0, high)
    )


def test_programs_that_break_nothing_pass(capsys):
    assert check([sliced(5), sliced(4)], TRN2, 2)
    out = capsys.readouterr().out
    assert out.count("small (decode, 4 ranks, trn2, LNC 2)") == 2
    assert out.count("breaks no rule") == 2
    for part in ("opcodes", "types", "parameters", "updated in place", "memory of a core"):
        assert part in out


def test_one_broken_rule_fails_all(capsys):
    assert not check([sliced(5), sliced(6)], TRN2, 2)
    out = capsys.readouterr().out
    assert "error: slice-index: a dynamic slice lies in its operand" in out
    assert "NRT_EXEC_OOB" in out
    assert "test_check.py:" in out
    assert "found=(0, 6), allowed=(0, 5)" in out
    assert "breaks rules at 1 places" in out


def test_a_rule_that_is_broken_often_is_listed_a_few_times(capsys):
    def many(x, i):
        return [lax.dynamic_slice(x, (i,), (size,)) for size in range(1, 9)]

    assert not check([program(many, spec((8,), F32), spec((), np.int32))], TRN2, 2)
    out = capsys.readouterr().out
    assert out.count("dynamic-slice.") == 5 and "and 3 more" in out


def test_json_is_one_object(capsys):
    assert not check([sliced(5), sliced(6)], TRN2, 2, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [one["passes"] for one in shown["programs"]] == [True, False]


def test_no_programs_break_no_rule(capsys):
    assert check([], TRN2, 2, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"programs": []}


def test_opcodes_of_the_compiler_are_asked_for():
    known = frozenset(report(sliced(5), TRN2).opcodes)
    assert check([sliced(5)], TRN2, 2, known | {"add"})
    assert not check([sliced(5)], TRN2, 2, known - {"dynamic-slice"})


@pytest.mark.parametrize(("command", "needed"), [(main, ()), (compile_main, ("--output", "x"))])
def test_a_recorded_list_has_an_opcode_a_line(command, needed, tmp_path):
    """In the compiler's spelling or in XLA's, and the same for both commands."""
    recorded = tmp_path / "operators.txt"
    recorded.write_text("add\n\nDynamic-Slice \nreduce_scatter\n")
    context = command.make_context("command", ["model", "--operators", str(recorded), *needed])
    assert context.params["operators"] == {"add", "dynamic-slice", "reduce-scatter"}


@pytest.mark.parametrize("content", [b"\n", b"", b"\xff\xfe\x00"])
@pytest.mark.parametrize("command", [main, compile_main])
def test_a_list_that_is_none_is_refused(command, content, tmp_path):
    broken = tmp_path / "operators.txt"
    broken.write_bytes(content)
    result = CliRunner().invoke(command, ["model", "--operators", str(broken)])
    assert result.exit_code == 2
    assert "operators.txt" in result.output or "cannot be read" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target", "trn9"], "trn2"),
        (["--lnc", "3"], "the logical core size of trn2 is one of"),
        (["--operators", "missing.txt"], "missing.txt"),
        (["--tp", "three"], "three"),
        (["--speculative-config", "mtp"], "is not valid JSON"),
        (["--speculative-config", "{}"], "needs a method"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_settings_exit_with_2(arguments, message):
    result = CliRunner().invoke(main, ["model", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_help_says_what_is_asked_for():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for option in ("--target", "--lnc", "--tp", "--dcp", "--json", "--operators", "--draft-tokens"):
        assert option in result.output


@pytest.mark.parametrize("command", [(main, ()), (compile_main, ("--output", "x"))])
def test_options_are_the_settings_of_an_engine(command):
    command, needed = command
    speculation = '{"method": "mtp", "num_speculative_tokens": 2}'
    arguments = ["model", *needed, "--index-kv", "replicated", "--speculative-config", speculation]
    config = engine_config(command.make_context("command", arguments).params)
    assert (config.model, config.index_kv, config.drafts_with_model) == (
        "model",
        "replicated",
        True,
    )
    plain = engine_config(command.make_context("command", ["model", *needed]).params)
    assert plain == EngineConfig("model")
