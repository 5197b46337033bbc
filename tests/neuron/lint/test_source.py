"""The line that a finding shows."""

import numpy as np
import pytest
from jax import lax

from neuron.lint.graph import Graph
from neuron.lint.source import ROOT, source_line
from tests.neuron.lint.programs import program, spec


@pytest.fixture
def sliced():
    """A program with one slice, in the module that this is."""
    small = program(
        lambda x, i: lax.dynamic_slice(x, (i,), (3,)) * np.float32(2),
        spec((8,), np.float32),
        spec((), np.int32),
    )
    graph = Graph(small.module)
    return graph, next(graph.of("dynamic-slice"))


def add_frame(module, path, line, parent):
    """A frame called from ``parent``; its number."""
    index = module.stack_frame_index
    index.file_names.append(str(path))
    index.file_locations.add(file_name_id=len(index.file_names), line=line)
    index.stack_frames.add(file_location_id=len(index.file_locations), parent_frame_id=parent)
    return len(index.stack_frames)


def test_outside_our_packages_it_is_the_innermost_frame(sliced):
    graph, instruction = sliced
    outer = instruction.metadata.stack_frame_id
    instruction.metadata.stack_frame_id = add_frame(graph.module, "/lib/inner.py", 7, outer)
    assert source_line(graph, instruction) == "/lib/inner.py:7"


def test_of_our_packages_it_is_the_innermost_frame(sliced):
    graph, instruction = sliced
    frame = 0
    for path, line in (("dcpjax/outer.py", 1), ("neuron/inner.py", 2)):
        frame = add_frame(graph.module, ROOT / path, line, frame)
    instruction.metadata.stack_frame_id = add_frame(graph.module, "/lib/foreign.py", 3, frame)
    assert source_line(graph, instruction) == "neuron/inner.py:2"


def test_without_frames_it_is_that_of_a_user(sliced):
    graph, instruction = sliced
    (user,) = graph.users[instruction.id]
    instruction.ClearField("metadata")
    user.metadata.stack_frame_id = add_frame(graph.module, ROOT / "dcpjax/user.py", 4, 0)
    assert source_line(graph, instruction) == "dcpjax/user.py:4"


def test_older_modules_have_a_file_and_a_line(sliced):
    graph, instruction = sliced
    instruction.ClearField("metadata")
    instruction.metadata.source_file = str(ROOT / "dcpjax" / "old.py")
    instruction.metadata.source_line = 12
    assert source_line(graph, instruction) == "dcpjax/old.py:12"


def test_with_nothing_to_go_by_there_is_none(sliced):
    graph, instruction = sliced
    for one in graph:
        one.ClearField("metadata")
    assert source_line(graph, instruction) is None
