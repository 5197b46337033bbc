"""``dcpjax plan`` and ``dcpjax simulate``: output, files, and errors that end with exit code 2."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import dcpjax
from dcpjax.cli import main
from dcpjax.planner import kv_bytes_per_token, read_steps
from tests.planner.test_search import parse

ASSETS = Path(dcpjax.__file__).parent / "assets"
TRACES = Path(__file__).resolve().parents[1] / "assets" / "traces"
PLAN = ["plan", "glm-5.2", "--device", "h200", "--num-devices", "16", "--context", "1M"]
SIMULATE = ["simulate", "glm-5.2", "--device", "h200", "--decode", "TP8 DCP8"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_explains_itself_and_ends_with_commands_that_work():
    text = output(*PLAN)
    assert "DP8: a sequence of 1,048,576 tokens takes 53.4 GiB of each rank" in text
    assert "39.0 GiB short" in text and "54,728 bytes of KV a token" in text
    commands = [line for line in text.splitlines() if line.startswith("dcpjax ")]
    assert commands
    for command in commands:
        parse(command)
    assert "is not served" not in text and "The best that is" not in text


def test_a_model_that_is_only_known_by_its_shape_has_a_placeholder():
    text = output(*PLAN)
    commands = [line for line in text.splitlines() if line.startswith("dcpjax serve")]
    assert commands and all(line.split()[2] == "/path/to/glm-5.2" for line in commands)
    assert "/path/to/glm-5.2 stands for the folder" in text and "--model-path" in text
    assert "--load-format dummy" in text


@pytest.mark.parametrize("name", ["glm-tiny", "smollm2-135m"])
def test_what_serve_knows_by_name_is_planned_and_served_by_name(name):
    text = output("plan", name, "--device", "h200", "--num-devices", "2", "--context", "1K")
    commands = [line for line in text.splitlines() if line.startswith("dcpjax serve")]
    assert commands and all(line.split()[2] == name for line in commands)
    assert "/path/to" not in text and "--load-format" not in text
    for command in commands:
        parse(command)


def test_a_small_latent_model_is_planned_in_a_format_that_it_can_have():
    """The widths of its latents have no whole blocks of scales; on what it was told it insists."""
    config = str(Path(ASSETS, "glm-tiny", "config.json"))
    options = ["--device", "h200", "--num-devices", "2", "--context", "1K"]
    document = json.loads(output("plan", config, *options, "--json"))
    assert document["model"]["name"] == "glm-tiny"
    assert document["model"]["cache_dtype"] == "bfloat16"
    (assumption,) = document["assumptions"]
    assert "the cache is bfloat16" in assumption and "dim=64" in assumption
    assert assumption in output("plan", config, *options)
    named = json.loads(output("plan", config, *options, "--json", "--kv-cache-dtype", "float32"))
    assert named["assumptions"] == [] and named["model"]["cache_dtype"] == "float32"
    assert all("--kv-cache-dtype float32 " in c for c in named["launch"]["commands"][:-1])


def test_the_planned_cluster_is_simulated_as_it_is_printed():
    document = json.loads(output(*PLAN, "--json"))
    command = ["simulate", "glm-5.2", "--device", "h200", "--num-requests", "2", "--json"]
    for kind in ("→", "layer split →", "prompts included"):
        label = next(p["cluster"] for p in document["clusters"] if kind in p["cluster"])
        whole = json.loads(output(*command, "--decode", label))
        assert whole["num_devices"] == 16
        if "→" in label:
            prefill, decode = label.split(" → ")
            assert whole == json.loads(output(*command, "--prefill", prefill, "--decode", decode))


def test_a_plan_as_json():
    document = json.loads(output(*PLAN, "--json", "--hit-rate", "0.5", "--ttft", "100"))
    assert document["model"]["kv_bytes_per_token"] == kv_bytes_per_token("glm-5.2")
    assert document["winner"]["cluster"] in {p["cluster"] for p in document["clusters"]}
    assert document["demand"]["ttft"] == 100 and "tpot" not in document["demand"]
    moved = document["transfer"]
    assert moved["bytes"] == sum(map(sum, moved["bytes_by_path"]))
    assert set(document["rests_on"]) == {"datasheet", "measured", "reported", "derived"}


def test_objectives_that_nothing_keeps_are_said():
    text = output(*PLAN, "--tpot", "0.0001")
    assert "No cluster keeps the objectives" in text


def test_a_small_model_s_winner_is_started_with_the_printed_commands():
    text = output(
        *("plan", "smollm2-360m", "--device", "h100", "--num-devices", "2", "--context", "8K"),
        *("--model-path", "./a model"),
    )
    commands = [line for line in text.splitlines() if line.startswith("dcpjax serve")]
    assert commands and all("'./a model'" in command for command in commands)
    for command in commands:
        parse(command)


# simulate


def test_a_trace_is_replayed():
    arguments = [*SIMULATE, "--prefill", "PCP8 DCP8", "--draft-tokens", "3", "--json"]
    trace = str(TRACES / "mooncake_conversation.jsonl")
    report = json.loads(output(*arguments, "--trace", trace, "--max-requests", "30"))
    assert report["num_requests"] == 30 and report["num_devices"] == 16
    assert report["ttft"]["p50"] <= report["ttft"]["p90"] <= report["ttft"]["max"]
    again = json.loads(output(*arguments, "--trace", trace, "--max-requests", "30"))
    assert again == report


def test_agents_are_replayed_in_a_closed_loop():
    report = json.loads(
        output(
            *(*SIMULATE, "--prefill", "2 x PCP8 layer-split", "--routing", "prefix", "--json"),
            *("--trace", str(TRACES / "agentic"), "--concurrency", "2", "--no-think-times"),
            *("--ttft", "60", "--fail", "decode:0:30:5"),
        )
    )
    assert report["hit_rate"] > 0.5 and 0 <= report["good_share"] <= 1
    assert report["num_requests"] > 20 and report["mean_present"] <= 2


def test_made_up_traffic_as_tables_and_page(tmp_path: Path):
    file = tmp_path / "report.html"
    text = output(*SIMULATE, "--num-requests", "20", "--num-turns", "2", "--html", str(file))
    assert "time to first token" in text and "tokens/s/user" in text
    assert file.read_text().count("<svg") == 1


def test_recorded_steps_replace_estimates(tmp_path: Path):
    table = tmp_path / "steps.json"
    rows = {"decode": [[1, 100, 1.0], [2, 100, 1.0]], "prefill": [[10, 0, 2.0], [20, 0, 2.0]]}
    table.write_text(json.dumps(rows))
    report = json.loads(
        output(
            *(*SIMULATE, "--steps", str(table), "--json", "--num-requests", "1"),
            *("--num-input", "100", "--num-output", "10"),
        )
    )
    assert report["ttft"]["max"] == pytest.approx(2.0, rel=1e-3)


def test_steps_recorded_by_shape_replace_estimates(tmp_path: Path):
    """A prompt that fills the widest shape, and one step of decode."""
    row = {"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [1]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row))
    table = Path(__file__).with_name("recorded_steps.json")
    options = ["--steps", str(table), "--trace", str(tmp_path / "trace.jsonl"), "--json"]
    report = json.loads(output(*SIMULATE, *options))
    steps = read_steps(table)
    assert report["ttft"]["max"] == pytest.approx(steps.with_prompts([(512, 0)], 0))
    seconds, per_token = steps.decode(1)
    assert report["tpot"]["max"] == pytest.approx(seconds + 512 * per_token)


# Bad input


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "glm-9", *PLAN[2:]], "known name"),
        ([*PLAN, "--device", "tpu"], "device is known"),
        ([*PLAN, "--context", "2M"], "1,048,576 tokens too long"),
        ([*PLAN, "--context", "lots"], "64K or 1M"),
        ([*PLAN, "--device", "h100"], "GiB too much"),
        ([*PLAN, "--num-devices", "0"], "at least one device"),
        ([*PLAN, "--hit-rate", "-1"], "hit_rate"),
        ([*PLAN, "--concurrency", "-2"], "concurrency"),
        ([*PLAN, "--num-input", "1M", "--num-output", "1K"], "longest context"),
        ([*PLAN, "--tpot", "0"], "objectives"),
        ([*PLAN, "--kv-cache-dtype", "int4"], "Error: kv_cache_dtype is a format"),
        (["plan", "glm-tiny", *PLAN[2:-1], "1K", "--kv-cache-dtype", "fp8_ds_mla"], "dim=64"),
        (
            ["plan", "qwen3-8b", *PLAN[2:-1], "8K", "--kv-cache-dtype", "fp8_ds_mla"],
            "kv_cache_dtype",
        ),
        ([*PLAN, "--html", "/no/such/folder/x.html"], "cannot write"),
        ([*SIMULATE, "--trace", "/no/such/trace"], "trace exists"),
        ([*SIMULATE, "--decode", "much"], "engines are written"),
        ([*SIMULATE, "--kv-cache-dtype", "int4"], "kv_cache_dtype is a format"),
        ([*SIMULATE, "--decode", "TP8 → TP8", "--prefill", "TP8"], "said once"),
        ([*SIMULATE, "--decode", "TP8", "--num-input", "900K"], "tokens too long"),
        ([*SIMULATE, "--fail", "decode:0"], "ROLE:INDEX:TIME:SECONDS"),
        ([*SIMULATE, "--fail", "router:0:1:1"], "prefill or decode"),
        ([*SIMULATE, "--fail", "decode:7:1:1"], "engine of the cluster"),
        ([*SIMULATE, "--request-rate", "0"], "rate is above 0"),
        ([*SIMULATE, "--concurrency", "0"], "concurrency"),
        ([*SIMULATE, "--steps", "/no/such/table"], "table of steps"),
        ([*SIMULATE, "--num-requests", "-1"], "num_requests"),
        ([*PLAN, "--host-gib", "nan"], "host's memory"),
        ([*SIMULATE, "--host-gib", "-4"], "host's memory"),
        ([*SIMULATE, "--acceptance-length", "0"], "a token or more"),
        ([*SIMULATE, "--acceptance-length", "nan"], "a token or more"),
        ([*SIMULATE, "--max-num-seqs", "0"], "max_batch is at least 1"),
        ([*SIMULATE, "--max-num-batched-tokens", "0"], "chunk is at least 1"),
        ([*SIMULATE, "--fail", "decode:0:nan:1"], "fails at a time from 0 on"),
        ([*SIMULATE, "--fail", "decode:0:1:0"], "fails at a time from 0 on"),
        (
            [*SIMULATE, "--trace", str(TRACES / "azure23_conv.csv"), "--max-model-len", "1"],
            "no session",
        ),
        (
            [*SIMULATE, "--trace", str(TRACES / "azure23_conv.csv"), "--max-requests", "0"],
            "max-requests",
        ),
    ],
)
def test_wrong_input_ends_with_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output and "Traceback" not in result.output


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 3, "output_length": 1}\n{broken\n')
    result = run(*SIMULATE, "--trace", str(trace))
    assert result.exit_code == 2 and "line=1" in result.output
    trace.write_text('{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": [1]}\n{x')
    result = run(*SIMULATE, "--trace", str(trace))
    assert result.exit_code == 2 and "line=2" in result.output


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_help_is_for_newcomers(command):
    text = output(command, "--help")
    assert "Example" in text and "--json" in text and "h200" in text
