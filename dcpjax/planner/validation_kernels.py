"""Published figures of kernels and links, and all chapters of the page together."""

from dcpjax.planner.data import read_data
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import collective_seconds, constant
from dcpjax.planner.models import find_model
from dcpjax.planner.steps import StepCost, decode_step, prefill_step
from dcpjax.planner.validation import Chapter, Row, one
from dcpjax.planner.validation_rows import (
    B200,
    H200,
    K32,
    bytes_chapter,
    capacity_chapter,
    cliff_chapter,
    decode_chapter,
    serving_chapter,
    sparse_chapter,
)


def all_chapters() -> list[Chapter]:
    """The whole page. Takes a few seconds: some figures are simulated."""
    return [
        bytes_chapter(),
        sparse_chapter(),
        capacity_chapter(),
        cliff_chapter(),
        decode_chapter(),
        serving_chapter(),
        kernels_chapter(),
        links_chapter(),
    ]


DECODE_MODULES = {
    1: (0.197, 0.206, 0.207, 0.216),
    8: (0.223, 0.234, 0.242, 0.271),
    32: (0.263, 0.284, 0.316, 0.431),
    128: (0.357, 0.405, 0.517, 0.970),
    256: (0.523, 0.611, 0.829, 1.834),
}
"""Milliseconds of a layer's attention by batch, at contexts of 1K, 8K, 32K and 128K tokens."""
CONTEXTS = (1024, 8192, 32768, 131072)
PROMPT_MODULES = {2048: 2.02, 8192: 8.64, 32768: 40.6}
"""Milliseconds of a layer's attention by prompt length."""


def _attention_ms(step: StepCost, floor: bool) -> float:
    """Projections, attention and indexer of one layer."""
    parts = step.by_part()
    seconds = sum(parts[name] for name in ("projections", "attention", "indexer"))
    launches = constant("sparse_attention_floor_us").value * 1e-3 if floor else 0.0
    return seconds / 78 * 1e3 + launches


def kernels_chapter() -> Chapter:
    """Attention modules of GLM-5 as AIConfigurator collected them."""
    model = find_model("glm-5")
    rows: list[Row] = []
    for batch, times in DECODE_MODULES.items():
        for context, published in zip(CONTEXTS, times, strict=True):
            step = decode_step(model, H200, Deployment(dp=8), batch, context)
            status = "calibrated" if (batch, context) == (1, 1024) else "predicted"
            what = f"decode, batch {batch}, {context // 1024}K tokens"
            rows.append(one(what, published, _attention_ms(step, True), "ms", 3, status))
    for tokens, published in PROMPT_MODULES.items():
        step = prefill_step(model, H200, Deployment(dp=8), tokens, 0)
        ours = _attention_ms(step, True)
        rows.append(one(f"prompt of {tokens:,} tokens", published, ours, "ms", 2))
    pcp = prefill_step(model, B200, Deployment(pcp=8), K32, 0)
    rows.append(one("whole layer, 32K tokens, CP8 on B200", 7.47, pcp.seconds / 78 * 1e3, "ms", 2))
    text = (
        "Source: NVIDIA AIConfigurator, GLM-5 on H200 (vLLM 0.24, FP8 KV, 64 heads), milliseconds "
        "a layer. The floor of a layer is set by the first row."
    )
    return Chapter("Kernels", text, tuple(rows))


def links_chapter() -> Chapter:
    """Collectives and descriptors."""
    rows = [
        one(f"{kind}, {ranks} GPUs, {size >> 20} MiB", microseconds,
            collective_seconds(kind, ranks, size, H200) * 1e6, "µs", 0, "predicted")
        for kind, ranks, size, microseconds in read_data("collectives")["points"]
    ]  # fmt: skip
    each = constant("descriptor_us").value * 1e-3
    rows += [
        one("posting 23,252 descriptors (vLLM #55841)", 79.6, 23_252 * each, "ms", 1),
        one("posting 18,880 descriptors (nixl #1514)", 46, 18_880 * each, "ms", 1),
    ]
    text = (
        "Source: NCCL 2.29.2 on one H200 node (AIConfigurator); the two constants of each "
        "collective fit all sizes together. Descriptors: as the issues state."
    )
    return Chapter("Links", text, tuple(rows))
