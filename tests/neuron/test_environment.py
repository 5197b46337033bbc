"""Each setting that Neuron needs is missed when it is missing, and the fix makes it right."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcpjax.config.neuron_settings import (
    Finding,
    Situation,
    check_process,
    check_settings,
    require,
    visible_cores,
)
from dcpjax.errors import ConfigError
from neuron import environment
from neuron.environment import main
from neuron.machine import Machine, check_machine, look, neuron_chips

ONE_NODE = {"NEURON_LOGICAL_NC_CONFIG": "2"}
TRANSFER = {**ONE_NODE, "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
TWO_NODES = {
    **ONE_NODE,
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "NEURON_PJRT_PROCESSES_NUM_DEVICES": "64,64",
    "NEURON_PJRT_PROCESS_INDEX": "1",
    "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62182",
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:62183",
}
TWO_ENGINES = {
    **TRANSFER,
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
}
ALL_TWO_NODES = {**TWO_NODES, "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
GOOD = [
    (Situation(), ONE_NODE),
    (Situation(transfers_kv=True), TRANSFER),
    (Situation(transfers_kv=True, between_machines=True), TWO_ENGINES),
    (Situation(nodes=2), TWO_NODES),
    (Situation(nodes=2, transfers_kv=True), ALL_TWO_NODES),
    (Situation(lnc=1), {"NEURON_LOGICAL_NC_CONFIG": "1"}),
]


def found(situation: Situation, environ: dict[str, str], level: str) -> list[str]:
    return [item.name for item in check_settings(situation, environ) if item.level == level]


@pytest.mark.parametrize(("situation", "environ"), GOOD)
def test_nothing_is_wrong_where_all_is_set(situation: Situation, environ: dict[str, str]) -> None:
    assert found(situation, environ, "wrong") == found(situation, environ, "advice") == []
    require(check_settings(situation, environ))


@pytest.mark.parametrize(("situation", "environ"), GOOD)
def test_each_variable_is_missed(situation: Situation, environ: dict[str, str]) -> None:
    """Without any one of them something is wrong: none of the checks is for show."""
    for name in environ.keys() - {"JAX_COORDINATOR_ADDRESS"}:
        rest = {key: value for key, value in environ.items() if key != name}
        assert name in found(situation, rest, "wrong")


@pytest.mark.parametrize(("situation", "environ"), GOOD)
def test_doing_what_the_exports_say_makes_it_right(
    situation: Situation, environ: dict[str, str]
) -> None:
    fixes = (item.fix for item in check_settings(situation, {}) if item.fix)
    matches = (re.fullmatch(r"export (\w+)=([^<]+)", fix) for fix in fixes)
    exported = {match[1]: match[2] for match in matches if match}
    by_hand = {"NEURON_PJRT_PROCESS_INDEX", "NEURON_RT_ROOT_COMM_ID"}
    exported |= {name: environ[name] for name in by_hand & environ.keys()}
    assert found(situation, exported, "wrong") == found(situation, exported, "advice") == []


WRONG = {
    "another core size": (Situation(), {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    "the old name": (Situation(), {**ONE_NODE, "NEURON_RT_VIRTUAL_CORE_SIZE": "1"}),
    "shared memory on": (
        Situation(transfers_kv=True),
        {**TRANSFER, "FI_EFA_ENABLE_SHM_TRANSFER": "1"},
    ),
    "rounding": (Situation(), {**ONE_NODE, "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}),
    "on the host": (Situation(), {**ONE_NODE, "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1"}),
    "no CPU": (Situation(), {**ONE_NODE, "JAX_PLATFORMS": "neuron"}),
    "cores": (Situation(), {**ONE_NODE, "NEURON_RT_VISIBLE_CORES": "0-"}),
    "provider": (Situation(nodes=2), {**TWO_NODES, "FI_PROVIDER": "tcp"}),
    "counts of one node": (
        Situation(nodes=2),
        {**TWO_NODES, "NEURON_PJRT_PROCESSES_NUM_DEVICES": "64"},
    ),
    "no devices": (
        Situation(nodes=2),
        {**TWO_NODES, "NEURON_PJRT_PROCESSES_NUM_DEVICES": "64,0"},
    ),
    "index": (Situation(nodes=2), {**TWO_NODES, "NEURON_PJRT_PROCESS_INDEX": "2"}),
    "no port": (Situation(nodes=2), {**TWO_NODES, "NEURON_RT_ROOT_COMM_ID": "10.0.0.1"}),
    "loopback": (Situation(nodes=2), {**TWO_NODES, "NEURON_RT_ROOT_COMM_ID": "localhost:9"}),
    "one port": (
        Situation(nodes=2),
        {**TWO_NODES, "NEURON_RT_ROOT_COMM_ID": "10.0.0.1:62183"},
    ),
    "one port by option": (
        Situation(nodes=2, coordinator="10.0.0.1:62182"),
        TWO_NODES,
    ),
    "port range": (Situation(), {**ONE_NODE, "NEURON_RT_ROOT_COMM_ID": "h:65536"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_found_alone_with_a_fix(case: str) -> None:
    situation, environ = WRONG[case]
    wrong = [item for item in check_settings(situation, environ) if item.level == "wrong"]
    assert len(wrong) == 1
    assert wrong[0].fix and wrong[0].reason
    assert environ[wrong[0].name] in wrong[0].found
    with pytest.raises(ConfigError, match=wrong[0].name):
        require(wrong)


@pytest.mark.parametrize(
    "environ",
    [
        {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"},
        {"NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": ""},
        {"JAX_PLATFORMS": "neuron,cpu"},
        {"JAX_PLATFORMS": "cpu"},
        {"NEURON_RT_VIRTUAL_CORE_SIZE": "2"},
        {"NEURON_RT_ROOT_COMM_ID": "localhost:4000"},
        {"NEURON_RT_VISIBLE_CORES": "0-3,7"},
    ],
)
def test_harmless_values(environ: dict[str, str]) -> None:
    assert found(Situation(), {**ONE_NODE, **environ}, "wrong") == []


@pytest.mark.parametrize(
    "environ",
    [
        {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "4"},
        {"NEURON_RT_ALLOW_LEGACY_NEFF": "1"},
        {"NEURON_RT_VISIBLE_CORES": "0", "NEURON_RT_NUM_CORES": "4"},
    ],
)
def test_advice_stops_nobody(environ: dict[str, str]) -> None:
    assert found(Situation(), {**ONE_NODE, **environ}, "wrong") == []
    assert len(found(Situation(), {**ONE_NODE, **environ}, "advice")) == 1


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("3,1", (3, 1)), ("0-1, 4-4", (0, 1, 4))],
)
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert visible_cores(text) == cores


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "0-", "0,,1", "0,0", "0-2,1", "3-1", "0,3-1", "0:3", "0-99999999"]
)
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(ConfigError):
        visible_cores(text)


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"lnc": 3}])
def test_a_situation_that_is_none(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Situation(**wrong)  # pyright: ignore[reportArgumentType]


GOOD_MACHINE = Machine(16, 16, (2, 1), (2, 9, 0), (1, 4, 0), True)


def machine_findings(situation: Situation, **changes: object) -> dict[str, Finding]:
    machine = Machine(**{**vars(GOOD_MACHINE), **changes})  # pyright: ignore[reportArgumentType]
    return {item.name: item for item in check_machine(situation, machine) if item.level != "ok"}


def test_a_whole_machine() -> None:
    for situation, _ in GOOD:
        assert machine_findings(situation) == {}


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"neuron_devices": 0}, "Neuron devices", "wrong"),
        ({"efa_adapters": 15}, "EFA adapters", "wrong"),
        ({"libfabric": None}, "libfabric", "wrong"),
        ({"libfabric": (1, 20)}, "libfabric", "wrong"),
        ({"libfabric": (1, 21)}, "libfabric", "advice"),
        ({"hwloc": None}, "hwloc", "wrong"),
        ({"nixl": None}, "nixl", "wrong"),
        ({"nixl": (0, 9, 0)}, "nixl", "wrong"),
        ({"cuda_stub": False}, "libcuda.so.1", "advice"),
    ],
)
def test_what_a_transfer_lacks(changes: dict[str, object], name: str, level: str) -> None:
    (finding,) = machine_findings(Situation(transfers_kv=True), **changes).values()
    assert (finding.name, finding.level) == (name, level) and finding.fix


def test_an_engine_that_transfers_nothing_needs_no_libraries() -> None:
    changes = {"libfabric": None, "hwloc": None, "nixl": None, "cuda_stub": False}
    assert machine_findings(Situation(), efa_adapters=0, **changes) == {}
    assert set(machine_findings(Situation(nodes=2), **changes)) == {"libfabric"}


def pci(folder: Path, devices: list[tuple[str, str]]) -> Path:
    for number, (vendor, device) in enumerate(devices):
        entry = folder / f"0000:00:{number:02x}.0"
        entry.mkdir(parents=True)
        (entry / "vendor").write_text(vendor + "\n")
        (entry / "device").write_text(device + "\n")
    (folder / "not a device").mkdir()
    return folder


def test_devices_are_counted(tmp_path: Path) -> None:
    folder = pci(
        tmp_path,
        [
            ("0x1d0f", "0x7364"),
            ("0x1d0f", "0x7364"),
            ("0x1d0f", "0xefa2"),
            ("0x1d0f", "0x8061"),  # a disk
            ("0x10de", "0x7364"),  # another vendor
        ],
    )
    machine = look(folder)
    assert (machine.neuron_devices, machine.efa_adapters) == (2, 1)
    assert neuron_chips(folder) == {"trn2": 2}
    assert neuron_chips(tmp_path / "nowhere") == {}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ALL_TWO_NODES.keys() | {"JAX_PLATFORMS"}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_command_shows_what_to_do(clean: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["--settings-only", "--transfer"])
    assert result.exit_code == 1
    assert "export FI_EFA_ENABLE_SHM_TRANSFER=0" in result.output
    for name, value in TRANSFER.items():
        clean.setenv(name, value)
    assert CliRunner().invoke(main, ["--settings-only", "--transfer"]).exit_code == 0


def test_the_command_looks_at_the_machine(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(environment, "look", lambda: GOOD_MACHINE)
    for name, value in ALL_TWO_NODES.items():
        clean.setenv(name, value)
    result = CliRunner().invoke(main, ["--nodes", "2", "--transfer", "--json"])
    assert result.exit_code == 0
    findings = json.loads(result.stdout)["findings"]
    assert {"EFA adapters", "NEURON_RT_ROOT_COMM_ID"} <= {item["name"] for item in findings}
    assert {item["level"] for item in findings} == {"ok"}


def test_values_are_shown_as_they_are(clean: pytest.MonkeyPatch) -> None:
    """Brackets are no markup."""
    clean.setenv("NEURON_RT_ROOT_COMM_ID", "[bold]x")
    result = CliRunner().invoke(main, ["--settings-only"])
    assert result.exit_code == 1 and "[bold]x" in result.output


def test_a_wrong_situation_is_a_wrong_option() -> None:
    assert CliRunner().invoke(main, ["--nodes", "0", "--settings-only"]).exit_code == 2


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NEURON_CC_FLAGS": "--model-type transformer"},
        {"NEURON_CC_FLAGS": "--lnc 2 -O1", "NEURON_LOGICAL_NC_CONFIG": "2"},
        {"NEURON_CC_FLAGS": "--verbose 35 --lnc=1", "NEURON_LOGICAL_NC_CONFIG": "1"},
        {"NEURON_LOGICAL_NC_CONFIG": "1", "JAX_PLATFORMS": "neuron,cpu"},
    ],
)
def test_an_engine_starts_with_its_plugins_own_defaults(environ: dict[str, str]) -> None:
    check_process(environ)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NEURON_CC_FLAGS": "--lnc 2"}, "NEURON_LOGICAL_NC_CONFIG='unset'"),
        (
            {"NEURON_CC_FLAGS": "-lnc=1", "NEURON_LOGICAL_NC_CONFIG": "2"},
            "export NEURON_LOGICAL_NC_CONFIG=1",
        ),
        ({"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}, "unset NEURON_RT_STOCHASTIC_ROUNDING_EN"),
        ({"NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1"}, "thousands of times slower"),
        ({"JAX_PLATFORMS": "neuron"}, "export JAX_PLATFORMS=neuron,cpu"),
        ({"NEURON_RT_VISIBLE_CORES": "0-"}, "list of cores"),
    ],
)
def test_an_engine_does_not_start_with_a_wrong_setting(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_process(environ)


def test_flags_for_cores_of_another_size_are_found() -> None:
    environ = {**ONE_NODE, "NEURON_CC_FLAGS": "--lnc 1"}
    assert found(Situation(), environ, "wrong") == ["NEURON_CC_FLAGS"]


def test_an_engine_beside_others_needs_no_process_numbers(clean: pytest.MonkeyPatch) -> None:
    for name, value in TWO_ENGINES.items():
        clean.setenv(name, value)
    options = ["--settings-only", "--transfer-between-machines"]
    assert CliRunner().invoke(main, options).exit_code == 0
    clean.delenv("FI_PROVIDER")
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 1 and "export FI_PROVIDER=efa" in result.output
