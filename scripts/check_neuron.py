"""Lower the engine's steps for Neuron and look for rules that they break: one line per engine.

Part of scripts/check. ``python -m neuron.check CONFIG --tp N --dcp N`` shows all of one engine.
"""

import sys
from pathlib import Path
from typing import Any

from dcpjax.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from neuron.programs import Deployment, build_programs
from neuron.report import report
from neuron.targets import find_target

CONFIGS = Path(__file__).resolve().parent.parent / "neuron" / "configs"
LNC = 2
PRODUCER = KVTransferConfig("kv_producer", "NeuronNixlConnector")
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("smollm2", "trn2", {"tensor_parallel_size": 1}),
    ("smollm2", "trn2", {"tensor_parallel_size": 9, "decode_context_parallel_size": 3}),
    ("smollm2", "trn2", {"tensor_parallel_size": 3, "step_form": "unrolled"}),
    ("llama-70b", "trn2", {"tensor_parallel_size": 32, "decode_context_parallel_size": 4}),
    ("llama-70b", "trn2", {"tensor_parallel_size": 16, "decode_context_parallel_size": 2}),
    (
        "llama-70b",
        "trn2",
        {
            "tensor_parallel_size": 16,
            "decode_context_parallel_size": 2,
            "kv_transfer_config": PRODUCER,
            "apply_prefill_dcp": True,
        },
    ),
    (
        "llama-70b",
        "trn3",
        {
            "tensor_parallel_size": 32,
            "decode_context_parallel_size": 4,
            "kv_cache_dtype": "fp8",
        },
    ),
    (
        "qwen3-235b-attention",
        "trn2",
        {
            "tensor_parallel_size": 32,
            "decode_context_parallel_size": 8,
            "kv_cache_dtype": "fp8",
        },
    ),
    (
        "qwen3-235b-attention",
        "trn3",
        {"tensor_parallel_size": 16, "decode_context_parallel_size": 4},
    ),
    (
        "glm-5.2-three-layers",
        "trn2",
        {
            "tensor_parallel_size": 4,
            "decode_context_parallel_size": 4,
            "prefill_gather": "none",
            "speculative_config": SpeculativeConfig("mtp", 3),
        },
    ),
)


def main() -> int:
    is_clean = True
    for model, target, settings in CASES:
        gathers = settings.get("decode_context_parallel_size", 1) > 1
        defaults = {
            "dtype": "bfloat16",
            "block_size": 32,
            "max_model_len": 8192,
            "max_num_seqs": 4,
            "prefill_gather": "q" if gathers else "none",
        }
        config = EngineConfig(str(CONFIGS / f"{model}.json"), **{**defaults, **settings})
        chip = find_target(target)
        programs = build_programs(Deployment(config, chip, LNC), all_buckets=False)
        reports = [report(program, chip, lnc=LNC) for program in programs]
        findings = [str(finding) for one in reports for finding in one.errors]
        shown = " ".join(map(str, filter(_is_plain, settings.values())))
        print(f"{model} {target} {shown}: {len(programs)} programs, {len(findings)} broken rules")
        for finding in findings:
            print(f"    {finding}")
        is_clean = is_clean and not findings
    return 0 if is_clean else 1


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | str)


if __name__ == "__main__":
    sys.exit(main())
