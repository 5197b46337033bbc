"""GGUF headers: what the library writes is read; what is cut or corrupt is refused, never half."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcpjax.errors import CheckpointError
from dcpjax.gguf_file import read_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "\u4e2d")
    writer.add_array("a.strings", ["one", "", "three"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_bool("a.bool", True)
    writer.add_int8("a.int8", -1)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_float64("a.float64", 1e300)
    writer.add_tensor("matrix", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_those_of_the_library(path):
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items()}
    assert ours.metadata == {k: v for k, v in fields.items() if not k.startswith("GGUF.")}
    assert [
        (t.name, list(reversed(t.shape)), t.kind, t.offset, t.num_bytes)
        for t in ours.tensors.values()
    ] == [
        (t.name, t.shape.tolist(), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_a_cut_file_is_refused_wherever_it_ends(path, tmp_path):
    whole = path.read_bytes()
    end = max(t.offset + t.num_bytes for t in read_gguf(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(0, end, 3):
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_gguf(cut)
    cut.write_bytes(whole[:end])
    assert read_gguf(cut).metadata == read_gguf(path).metadata


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_corruption_never_ends_in_anything_but_a_checkpoint_error(path, tmp_path, data):
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(content)
    try:
        read_gguf(corrupt)
    except CheckpointError:
        pass  # the point: no other exception, and no endless reading of a huge count


def header(version=3, num_tensors=0, num_keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


UINT32, ARRAY = 4, 9
KEY = text(b"k") + struct.pack("<II", UINT32, 7)
TENSOR = text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "cut short"),
        (b"GGML" + bytes(60), "letters GGUF"),
        (header(version=1), "version=1"),
        (header(version=3 << 24), "version"),  # big endian
        (header(num_keys=2, rest=KEY + KEY), "name='k'"),
        (header(num_tensors=2, rest=TENSOR + TENSOR + bytes(64)), "name='t'"),
        (header(num_keys=2**63, rest=KEY), "cut short"),
        (header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", ARRAY, UINT32, 2**60)), "cut"),
        (header(num_keys=1, rest=text(b"k") + struct.pack("<I", 99)), "metadata type 99"),
        (header(num_keys=1, rest=text(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "array of"),
        (header(num_keys=1, rest=text(b"\xff") + struct.pack("<II", UINT32, 7)), "utf-8"),
        (
            header(num_keys=1, rest=text(b"general.alignment") + struct.pack("<II", UINT32, 0)),
            "alignment",
        ),
        (header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 1, 250, 0)), "250"),
        (header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 1, 8, 0)), "Q8_0"),
        (header(num_tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 2**61, 0, 0)), "ends at"),
    ],
)
def test_headers_that_make_no_sense_are_refused(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


@pytest.mark.parametrize("name", ["absent.gguf", "."])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_gguf(tmp_path / name)
