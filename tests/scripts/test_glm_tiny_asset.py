"""The weights that the project ships: what they are, and that they do what their README says."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from dcpjax.text import load_tokenizer
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.evaluate import (
    CONTEXT_OVER_TOPK,
    NOISE,
    SPARSE,
    acceptance_length,
    recall_of_a_key,
)
from scripts.tiny_glm.export import load
from scripts.tiny_glm.layers import Params
from scripts.tiny_glm.model import param_shapes
from scripts.tiny_glm.stages import PLAN
from scripts.tiny_glm.tokenizer import TOKEN_IDS
from scripts.tiny_glm.training import read_log

ASSET = Path(__file__).resolve().parents[2] / "dcpjax" / "assets" / "glm-tiny"
CONFIG = GlmConfig()
CONTEXT = CONTEXT_OVER_TOPK * CONFIG.index_topk
RESULTS = json.loads((ASSET / "evaluation.json").read_text())
MAX_BYTES = 8 << 20
ROWS = 32


@pytest.fixture(scope="module")
def params() -> Params:
    return load(ASSET, CONFIG)


def test_the_folder_is_small_and_has_what_a_server_reads():
    files = {path.name: path.stat().st_size for path in ASSET.iterdir()}
    assert sum(files.values()) <= MAX_BYTES
    needed = "config.json generation_config.json model.safetensors tokenizer.json "
    needed += "tokenizer_config.json chat_template.jinja log.jsonl evaluation.json README.md"
    assert set(needed.split()) == files.keys()
    assert json.loads((ASSET / "config.json").read_text()) == CONFIG.to_json()
    assert load_tokenizer(ASSET).vocab_size == len(TOKEN_IDS) <= CONFIG.vocab_size


def test_every_published_tensor_is_there_and_no_other():
    with safe_open(ASSET / "model.safetensors", framework="numpy") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    wanted = {}
    for name, shape in param_shapes(CONFIG).items():
        if ".mlp.experts." not in name:
            wanted[name] = shape
            continue
        for expert in range(shape[0]):
            wanted[name.replace(".experts.", f".experts.{expert}.")] = shape[1:]
    assert found == wanted
    assert f"model.layers.{CONFIG.num_hidden_layers}.eh_proj.weight" in found


def test_the_log_is_of_the_whole_plan():
    lines = list(read_log(ASSET / "log.jsonl"))
    ends = {line["stage"]: line["step"] for line in lines}
    assert ends == {stage.name: stage.num_steps for stage in PLAN}


def test_readme_states_the_numbers_of_the_evaluation():
    readme = (ASSET / "README.md").read_text()
    stated = re.findall(r"^\| .*\| (\d+(?:\.\d+)?) ?%? \|$", readme, re.MULTILINE)
    numbers = {name: value for name, value in RESULTS.items() if name != "accuracy"}
    values = [*numbers.values(), *RESULTS["accuracy"].values()]
    shown = {f"{100 * value:.1f}" if value <= 1 else f"{value:g}" for value in values}
    assert set(stated) <= shown and len(stated) >= 10


def test_the_evaluation_reaches_its_goals():
    assert RESULTS["recall_context"] == CONTEXT == 16 * CONFIG.index_topk
    assert RESULTS["recall"] >= 0.95 and RESULTS["acceptance_length"] >= 2.0
    assert RESULTS["recall_noise"] <= RESULTS["recall_by_guessing"]


def test_recall_goes_through_the_indexer(params: Params):
    assert recall_of_a_key(params, CONFIG, CONTEXT, SPARSE, ROWS) >= RESULTS["recall"] - 0.15
    assert recall_of_a_key(params, CONFIG, CONTEXT, NOISE, ROWS) <= 0.2


def test_drafts_are_accepted(params: Params):
    assert acceptance_length(params, CONFIG, rows=4, prompt=48, count=32) >= 2.0
