"""What decode context parallelism asks of a mesh and a model on AWS Neuron."""

from dcpjax.config.engine import EngineConfig
from dcpjax.config.glm import ModelConfig
from dcpjax.errors import MeshError


def broken_neuron_rules(
    config: EngineConfig, model: ModelConfig, *, transfers_kv: bool = False
) -> list[MeshError]:
    """The rules of decode context parallelism on AWS Neuron that these settings break.

    Neuron keeps one copy of a KV head on each rank, shares its tokens among the ranks of that head
    and splits its query heads over them; our own meshes need none of this. Without DCP no rule
    applies. Two further rules hold for every engine and are refused earlier, see
    :class:`EngineConfig`: dcp divides tp, and the interleave divides the block size.

    Args:
        transfers_kv: the engine sends its cache to another engine or receives it.
    """
    tp, dcp = config.tensor_parallel_size, config.decode_context_parallel_size
    interleave, page = config.interleave, config.block_size
    kv_heads, heads = model.num_kv_heads, model.num_heads
    rules: list[tuple[bool, str, dict[str, int]]] = [
        (tp > kv_heads, "tp is larger than kv_heads", {"tp": tp, "kv_heads": kv_heads}),
        (
            dcp <= tp // kv_heads,
            "dcp is at most tp // kv_heads",
            {"dcp": dcp, "tp": tp, "kv_heads": kv_heads},
        ),
        (
            heads // kv_heads % dcp == 0,
            "q_heads // kv_heads is a multiple of dcp",
            {"q_heads": heads, "kv_heads": kv_heads, "dcp": dcp},
        ),
        (
            interleave == page or not transfers_kv,
            "an engine that transfers its cache has an interleave of the block size",
            {"interleave": interleave, "block_size": page},
        ),
    ]
    return [MeshError(rule, **values) for holds, rule, values in rules if not holds and dcp > 1]
