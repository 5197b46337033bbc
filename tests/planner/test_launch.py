"""Commands of a cluster: ports that no two of its processes share, and a MODEL that serves."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import UnsupportedCombination
from dcpjax.models.catalog import bring_model
from dcpjax.planner import Demand, Deployment, find_device, find_model
from dcpjax.planner.candidates import Candidate
from dcpjax.planner.document import plan_document, plan_sections
from dcpjax.planner.evaluate import Setting
from dcpjax.planner.launch import MOST_ENGINES, launch
from dcpjax.planner.search import search
from dcpjax.planner.served_model import served_model
from tests.planner.test_search import read

DEMAND = Demand(context=8192, num_input=2048, num_output=128)
SETTING = Setting(find_model("qwen3-8b"), find_device("h200"), DEMAND)
TP2 = Deployment(tp=2)


def ports(commands: tuple[str, ...]) -> Iterator[int]:
    """All that the processes listen on."""
    for command in commands:
        options = read(command)
        yield options["port"]
        if options.get("kv_transfer_config"):
            yield options["kv_transfer_config"]["kv_port"]


@given(num_prefill=st.integers(0, 12), num_decode=st.integers(1, 12))
def test_no_two_processes_share_a_port(num_prefill, num_decode):
    source = (TP2, num_prefill) if num_prefill else ()
    found = launch(SETTING, Candidate(TP2, num_decode, *source), "x")
    taken = list(ports(found.commands))
    processes = 2 * (num_prefill + num_decode) + 1 if num_prefill else num_decode
    assert len(set(taken)) == len(taken) == processes
    assert all(1 <= port < 1 << 16 for port in taken)


def test_the_router_is_told_where_the_engines_listen():
    *engines, last = launch(SETTING, Candidate(TP2, 3, TP2, 2), "x").commands
    urls = [f"http://127.0.0.1:{read(command)['port']}" for command in engines]
    router = read(last)
    assert [*router["prefill_urls"], *router["decode_urls"]] == urls
    assert len(router["prefill_urls"]) == 2


def test_ports_suffice_for_as_many_engines_as_are_named():
    last = launch(SETTING, Candidate(TP2, 1, TP2, MOST_ENGINES - 1), "x").commands[-2:]
    assert max(ports(last)) < 1 << 16 and len(set(ports(last))) == 3
    with pytest.raises(UnsupportedCombination, match=f"num_prefill={MOST_ENGINES}"):
        launch(SETTING, Candidate(TP2, 1, TP2, MOST_ENGINES), "x")


def test_notes_say_what_the_commands_leave_open():
    assert launch(SETTING, Candidate(TP2, 1), "x").notes == ()
    several = launch(SETTING, Candidate(TP2, 2), "x").notes
    assert "devices of its own" in several[0] and "load balancer" in several[1]
    nodes = launch(SETTING, Candidate(TP2, 4, TP2, 4), "x").notes
    assert "devices of its own" in nodes[0] and "other hosts" in nodes[1]


def test_a_plan_of_which_nothing_is_served_says_why():
    result = replace(search("qwen3-8b", "h200", 1, DEMAND), servable=None, obstacle="a rule (x=1)")
    for winner, name in ((result.winner, "winner"), (None, "nearest")):
        document = plan_document(replace(result, winner=winner))
        (section,) = (s for s in plan_sections(document) if s.title == "Commands")
        assert section.notes[0] == f"The {name} is not served by this version: a rule (x=1)"
        assert len(section.notes) == 2 and not document["launch"]["commands"]


# MODEL


def test_a_folder_is_served_if_it_has_weights(tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(bring_model("glm-tiny") / "config.json", folder)
    for path in (folder, folder / "config.json"):
        served = served_model(str(path), find_model(str(path)))
        assert served.argument == str(folder) and "--load-format dummy" in served.note
    (folder / "model.safetensors").touch()
    assert served_model(str(folder), find_model(str(folder))).note is None


def test_shapes_and_configs_have_a_placeholder():
    shape = replace(SETTING.model, name="org/My Model")
    for model in (shape, {"model_type": "qwen3"}, "qwen3-8b"):
        served = served_model(model, shape)
        assert served.argument == "/path/to/My Model"
        assert served.note.startswith("/path/to/My Model stands for")


def test_who_names_the_folder_gets_no_placeholder():
    found = search("qwen3-8b", "h200", 1, DEMAND, model_argument="./here")
    assert found.served.argument == "./here" and found.served.note is None
    assert found.obstacle is None and found.servable[0] is found.winner
    assert found.servable[1].commands[0].startswith("dcpjax serve ./here ")
