"""Matrices of 8-bit floats with a scale per 128 x 128 block are read as what they mean."""

import json

import ml_dtypes
import numpy as np
import pytest

from dcpjax.errors import CheckpointError
from dcpjax.models.block_scales import dequantised
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.models.safetensors_files import open_tensors
from tests.models.tiny_glm import GLM, random_tensors, write_config

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
TYPES = {np.dtype(np.float32): "F32", E4M3: "F8_E4M3", E8M0: "F8_E8M0"}
SHAPES = [(1, 1), (127, 128), (128, 129), (129, 127), (300, 200), (256, 384)]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write_tensors(folder, tensors):
    """A safetensors file, byte by byte: the library's NumPy half has no 8-bit floats."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    content = len(text).to_bytes(8, "little") + text + data
    (folder / "model.safetensors").write_bytes(content)


def random_pair(shape, scale_type=np.float32):
    random = np.random.default_rng(sum(shape))
    matrix = (random.standard_normal(shape) * 100).astype(E4M3)
    blocks = [-(-size // 128) for size in shape]
    powers = np.exp2(random.integers(-20, 5, blocks)).astype(np.float32)
    factors = random.uniform(0.5, 2, blocks).astype(np.float32)
    return matrix, powers.astype(E8M0) if scale_type == E8M0 else powers * factors


def value_by_value(matrix, scales):
    rows, columns = np.indices(matrix.shape)
    return matrix.astype(np.float32) * scales.astype(np.float32)[rows // 128, columns // 128]


@pytest.mark.parametrize("scale_type", [np.float32, E8M0])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_value_meets_the_scale_of_its_block(tmp_path, shape, scale_type):
    matrix, scales = random_pair(shape, scale_type)
    write_tensors(tmp_path, {"x.weight": matrix, "x.weight_scale_inv": scales})
    stored = open_tensors(tmp_path)
    assert stored.shapes == {"x.weight": shape}
    read = stored.read("x.weight")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, value_by_value(matrix, scales))


def test_a_shifted_block_would_be_seen():
    matrix, scales = random_pair((300, 200))
    wrong = value_by_value(matrix, scales[:, ::-1])
    assert not np.array_equal(dequantised(matrix, scales), wrong)


def test_every_8_bit_value_is_that_of_torch():
    torch = pytest.importorskip("torch", reason="the oracle is torch")
    matrix = np.arange(256, dtype=np.uint8).reshape(2, 128)
    theirs = torch.from_numpy(matrix).view(torch.float8_e4m3fn).float().numpy() * np.float32(0.375)
    ours = dequantised(matrix.view(E4M3), np.full((1, 1), 0.375, np.float32))
    np.testing.assert_array_equal(ours, theirs)


X = np.ones((200, 130), E4M3)
SCALES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    "tensors, problems",
    [
        ({"x.weight": X}, {"without_scales": "x.weight"}),
        ({"y_scale_inv": SCALES}, {"without_matrix": "y_scale_inv"}),
        ({"x": X.astype(np.float32), "x_scale_inv": SCALES}, {"without_matrix": "x_scale_inv"}),
        ({"y": SCALES.astype(E8M0)}, {"without_matrix": "y"}),
        ({"x": X, "x_scale_inv": SCALES[:1]}, {"wrong_scales": "x_scale_inv (1, 2)"}),
        ({"x": X, "x_scale_inv": SCALES[0]}, {"wrong_scales": "x_scale_inv (2,)"}),
        ({"x": X[0], "x_scale_inv": SCALES[0]}, {"wrong_scales": "for (130,)"}),
        (
            {"x": X, "x_scale_inv": SCALES.astype(E4M3)},
            {"wrong_scales": "of float8_e4m3fn", "without_scales": "x_scale_inv"},
        ),
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_name(tmp_path, tensors, problems):
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_tensors(tmp_path)
    assert caught.value.values.keys() == problems.keys()
    for kind, shown in problems.items():
        assert shown in caught.value.values[kind][0]


def quantised(tensors):
    """The matrices of all layers but norms, routers and the draft layer's own projection."""
    kept = ("norm.weight", "bias", "mlp.gate.weight", "weights_proj.weight", "eh_proj.weight")
    result = {}
    for name, tensor in tensors.items():
        if "layers" in name and not name.endswith(kept):
            result[name] = (tensor * 16).astype(E4M3)
            result[f"{name}_scale_inv"] = np.full((1, 1), 1 / 16, np.float32)
        else:
            result[name] = tensor
    return result


def test_a_quantised_checkpoint_has_the_tensors_of_its_model(tmp_path):
    write_config(tmp_path, GLM | {"quantization_config": FP8})
    tensors = random_tensors(tmp_path)
    write_tensors(tmp_path, quantised(tensors))
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert checkpoint.dtype == "float32"  # of the embedding, which is not converted
    for name, tensor in tensors.items():
        np.testing.assert_allclose(checkpoint.read(name), tensor, rtol=2**-4, atol=2**-14)
    with pytest.raises(CheckpointError, match="no such tensor"):
        checkpoint.read("model.layers.0.self_attn.q_a_proj.weight_scale_inv")
