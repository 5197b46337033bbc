"""GGUF files written here open as the Hugging Face tensors they were made of."""

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from dcpjax.config import LlamaConfig, RopeScaling
from dcpjax.errors import CheckpointError
from dcpjax.models.checkpoint import expected_tensors, open_checkpoint
from dcpjax.models.gguf import read_config

# Rows of 256: one block of the K types, eight of the others.
SHAPE = {
    "vocab_size": 8,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
LLAMA = LlamaConfig("LlamaForCausalLM", **SHAPE, tie_word_embeddings=True)
QWEN2 = LlamaConfig("Qwen2ForCausalLM", **SHAPE, has_qkv_bias=True)
QWEN3 = LlamaConfig("Qwen3ForCausalLM", **SHAPE, has_qk_norm=True)
ARCHITECTURE = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SETTINGS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def random_tensors(config):
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


def gguf_name(name):
    """The library's own table of names, not ours."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    names.mapping.update(gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2).mapping)
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def interleaved(rows, heads):
    """Row by row: stored rows 2i and 2i + 1 of a head are its rows i and i + D/2."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + part * half + index
        for head in range(heads)
        for index in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def stored(config, name, value):
    if config.architecture == "LlamaForCausalLM":
        for suffix, heads in (
            ("q_proj.weight", config.num_heads),
            ("k_proj.weight", config.num_kv_heads),
        ):
            if name.endswith(suffix):
                return interleaved(value, heads)
    return value


def write(path, config, tensors, kind=Kind.F32, settings=SETTINGS, **metadata):
    """A file with its matrices stored as ``kind``; metadata keys with "__" for "."."""
    architecture = ARCHITECTURE[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in metadata.items():
        add(writer, key.replace("__", "."), value)
    for name, value in tensors.items():
        value = stored(config, name, value)
        if value.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(gguf_name(name) or name, value)
        else:
            blocks = gguf.quants.quantize(value, kind)
            writer.add_tensor(gguf_name(name) or name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    kinds = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c.architecture)
def test_tensors_come_back_in_hugging_face_order(tmp_path, config):
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", config, tensors)))
    assert checkpoint.shapes == expected_tensors(config)
    assert checkpoint.dtype == "float32"
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), value, err_msg=name)


def test_the_order_would_be_wrong_without_undoing_it(tmp_path):
    tensors = random_tensors(LLAMA)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(stored(LLAMA, name, tensors[name]), tensors[name])


@pytest.mark.parametrize(
    "kind, dtype", [(Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.F32, "float32")]
)
def test_plain_types_are_read_as_stored(tmp_path, kind, dtype):
    tensors = random_tensors(LLAMA)
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", LLAMA, tensors, kind)))
    assert checkpoint.dtype == dtype
    matrix = checkpoint.read("model.layers.1.self_attn.k_proj.weight")
    expected = tensors["model.layers.1.self_attn.k_proj.weight"].astype(
        ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    )
    assert matrix.dtype.name == dtype
    np.testing.assert_array_equal(matrix, expected)
    assert checkpoint.read("model.norm.weight").dtype == np.float32


@pytest.mark.parametrize("kind, levels", [(Kind.Q8_0, 254), (Kind.Q4_0, 15), (Kind.Q4_1, 15)])
def test_quantised_types_are_read_as_float32(tmp_path, kind, levels):
    tensors = random_tensors(LLAMA)
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", LLAMA, tensors, kind)))
    assert checkpoint.dtype == "float32"
    for name, value in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        # Half a step of a block that spans at most [-max, max], one step where the range is
        # not symmetric (Q4_0); the scale itself is float16.
        step = 2 * np.abs(value).max() / levels
        assert np.abs(read - value).max() <= step * 1.01, name


def nibbles(data):
    return np.concatenate([data & 15, data >> 4])


def q4_k_block(random):
    """144 bytes: two float16, twelve with 8 scales and 8 minima of 6 bits, 128 with 256 nibbles."""
    d, m = np.float16(0.01), np.float16(0.02)
    scales, minima = random.integers(0, 64, (2, 8))
    quants = random.integers(0, 16, 256)
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    pairs = quants.reshape(4, 2, 32)  # sub-blocks 2i and 2i + 1 share 32 bytes
    body = (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8).reshape(-1)
    values = [
        float(d) * int(scales[i // 32]) * int(quants[i]) - float(m) * int(minima[i // 32])
        for i in range(256)
    ]
    return d.tobytes() + m.tobytes() + packed.tobytes() + body.tobytes(), values


def q6_k_block(random):
    """210 bytes: 128 low nibbles, 64 high pairs of bits, 16 scales of int8, one float16."""
    d = np.float16(0.03)
    scales = random.integers(-128, 128, 16)
    quants = random.integers(0, 64, 256)
    low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    for i, quant in enumerate(quants.tolist()):
        half, rest = divmod(i, 128)
        quarter, column = divmod(rest, 32)
        low[half * 64 + quarter % 2 * 32 + column] |= (quant & 15) << quarter // 2 * 4
        high[half * 32 + column] |= (quant >> 4) << 2 * quarter
    values = [float(d) * int(scales[i // 16]) * (int(quants[i]) - 32) for i in range(256)]
    return low.tobytes() + high.tobytes() + scales.astype(np.int8).tobytes() + d.tobytes(), values


@pytest.mark.parametrize("kind, make_block", [(Kind.Q4_K, q4_k_block), (Kind.Q6_K, q6_k_block)])
def test_k_types_hold_the_formula(tmp_path, kind, make_block):
    random = np.random.default_rng(0)
    blocks, values = zip(*(make_block(random) for _ in range(256)), strict=True)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {key: value for key, value in random_tensors(LLAMA).items() if key != name}
    path = tmp_path / "m.gguf"
    write_with_blocks(path, tensors, name, blocks, kind)
    read = open_checkpoint(str(path)).read(name)
    np.testing.assert_allclose(read, np.array(values, np.float32), rtol=1e-5, atol=1e-6)


def write_with_blocks(path, tensors, name, blocks, kind):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in SETTINGS.items():
        add(writer, f"llama.{key}", value)
    for other, value in tensors.items():
        writer.add_tensor(gguf_name(other), stored(LLAMA, other, value))
    data = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), -1)
    writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_other_types_are_refused_by_name(tmp_path):
    path = write(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), Kind.Q5_0)
    with pytest.raises(CheckpointError, match="'Q5_0'"):
        open_checkpoint(str(path))


def read(tmp_path, config=LLAMA, tensors=None, settings=SETTINGS, **metadata):
    tensors = {"model.embed_tokens.weight": np.ones((8, 256), np.float32)} | (tensors or {})
    return read_config(write(tmp_path / "m.gguf", config, tensors, settings=settings, **metadata))[
        0
    ]


def test_config_from_metadata(tmp_path):
    metadata = {
        "llama__rope__freq_base": 5e5,
        "llama__vocab_size": 8,
        "general__name": "anything",
        "general__file_type": 3,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__eot_token_id": 3,
        "tokenizer__ggml__bos_token_id": 1,
    }
    config = read(tmp_path, **metadata)
    assert (config.rope_theta, config.rms_norm_eps) == (5e5, pytest.approx(1e-5))
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 3), 1)
    assert config.tie_word_embeddings
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "bos_token_id"])
@pytest.mark.parametrize("wrong", ["2", 2.0, True, 2**31, [2]])
def test_token_ids_are_integers(tmp_path, key, wrong):
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key} is a token id"):
        read(tmp_path, **{f"tokenizer__ggml__{key}": wrong})


def test_widths_may_be_given(tmp_path):
    widths = {"qwen3__attention__key_length": 128, "qwen3__attention__value_length": 128}
    assert read(tmp_path, QWEN3, **widths).head_dim == 128
    assert read(tmp_path, QWEN3).head_dim == 64


def test_an_output_matrix_unties_the_embeddings(tmp_path):
    head = {"lm_head.weight": np.ones((8, 256), np.float32)}
    assert not read(tmp_path, tensors=head).tie_word_embeddings


def test_linear_rope_scaling(tmp_path):
    metadata = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    assert read(tmp_path, **metadata).rope_scaling == RopeScaling("linear", 2.0)


def llama3_factors(factor, theta=5e5, head_dim=64):
    """The published rule, one frequency at a time."""
    factors = []
    for index in range(head_dim // 2):
        wave = 2 * np.pi * theta ** (2 * index / head_dim)
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recognised_by_its_factors(tmp_path, factor):
    tensors = {"rope_freqs.weight": llama3_factors(factor)}
    config = read(tmp_path, tensors=tensors, llama__rope__freq_base=5e5)
    assert config.rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)


def test_rope_factors_of_one_change_nothing(tmp_path):
    tensors = {"rope_freqs.weight": np.ones(32, np.float32)}
    assert read(tmp_path, tensors=tensors).rope_scaling is None


@pytest.mark.parametrize(
    "factors",
    [llama3_factors(8.0)[::-1].copy(), llama3_factors(8.0, theta=1e4), np.ones(8, np.float32)],
)
def test_other_rope_factors_are_refused(tmp_path, factors):
    with pytest.raises(CheckpointError, match="rope_freqs.weight"):
        read(tmp_path, tensors={"rope_freqs.weight": factors}, llama__rope__freq_base=5e5)


@pytest.mark.parametrize(
    "metadata, shown",
    [
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"llama__rope__scaling__type": "linear"}, "rope.scaling.factor"),
        ({"llama__expert_count": 8}, "'llama.expert_count': 8"),
        ({"llama__attention__sliding_window": 4096}, "4096"),
        ({"llama__logit_scale": 0.5}, "'llama.logit_scale': 0.5"),
        ({"llama__rope__dimension_count": 32}, "rope.dimension_count"),
        ({"llama__attention__value_length": 32}, "attention.value_length"),
        ({"other__key": 1}, "'other.key': 1"),
        ({"general__type": "adapter"}, "adapter"),
        ({"split__count": 2}, "'split.count': 2"),
    ],
)
def test_settings_that_are_not_understood_are_refused(tmp_path, metadata, shown):
    with pytest.raises(CheckpointError, match=shown):
        read(tmp_path, **metadata)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "embedding_length"])
def test_settings_that_are_needed_are_asked_for(tmp_path, key):
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path, settings={name: value for name, value in SETTINGS.items() if name != key})


def test_heads_per_layer_are_refused(tmp_path):
    settings = SETTINGS | {"attention.head_count_kv": [2, 1]}
    with pytest.raises(CheckpointError, match="head_count_kv"):
        read(tmp_path, settings=settings)


def test_other_architectures_are_refused(tmp_path):
    gguf_file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(gguf_file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="mamba"):
        open_checkpoint(str(gguf_file))


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"]
    tensors["blk.0.attn_extra.weight"] = np.ones(4, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((4, 256), np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(write(tmp_path / "m.gguf", LLAMA, tensors)))
    assert caught.value.values == {
        "missing": "1: model.norm.weight",
        "unknown": "1: blk.0.attn_extra.weight",
        "wrong_shape": "1: model.layers.1.mlp.up_proj.weight (4, 256) instead of (256, 256)",
    }


def test_without_weights_the_header_is_enough(tmp_path):
    tensors = {"model.embed_tokens.weight": np.ones((8, 256), np.float32)}
    path = write(tmp_path / "m.gguf", LLAMA, tensors)
    checkpoint = open_checkpoint(str(path), weights=False)
    assert checkpoint.shapes == expected_tensors(checkpoint.config)
    with pytest.raises(CheckpointError, match="without its weights"):
        checkpoint.read("model.norm.weight")
