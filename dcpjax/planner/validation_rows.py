"""Published figures of two posts, and how ours are computed: resharding, and PCP with DCP."""

from collections.abc import Sequence
from dataclasses import replace

from dcpjax.planner.cache_parts import kv_bytes_per_token, kv_parts
from dcpjax.planner.candidates import Candidate
from dcpjax.planner.demand import Demand
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.evaluate import Setting, evaluate
from dcpjax.planner.generate import Workload, generate_trace
from dcpjax.planner.hardware import GIB, constant, find_device
from dcpjax.planner.memory import capacity
from dcpjax.planner.models import find_model
from dcpjax.planner.roofline import indexer_crossover, model_intensity
from dcpjax.planner.sim_cluster import Cluster
from dcpjax.planner.sim_report import Report
from dcpjax.planner.sim_step import EngineSpec
from dcpjax.planner.simulate import simulate
from dcpjax.planner.step_times import ConstantSteps, EstimatedSteps
from dcpjax.planner.steps import StepCost, decode_step, prefill_step
from dcpjax.planner.transfers import naive_bytes, transfer_cost
from dcpjax.planner.validation import Chapter, Row, one

GLM = find_model("glm-5.2")
H200, B200, B300 = (find_device(name) for name in ("h200", "b200", "b300"))
MILLION, K32 = 1 << 20, 32768
SPLIT = Deployment(pcp=8, prefill_kv="layer_split", cache_dtype="fp8")
DCP4 = Deployment(tp=4, dcp=4, cache_dtype="fp8")
RAW = 78 * 576 / kv_bytes_per_token(GLM, cache_dtype="fp8", mtp=False)
"""The reshard post counts 576 bytes a token and layer, without indexer keys."""
DRAFTS = 5
SHARED = Deployment(pcp=8, dcp=8, prefill_kv="sharded", draft_tokens=3)


def bytes_chapter() -> Chapter:
    """What the reshard post derives from 576 bytes."""
    short = transfer_cost(GLM, SPLIT, DCP4, K32)
    long = transfer_cost(GLM, SPLIT, DCP4, 500_000)
    per_rank = RAW * short.busiest_target_bytes
    needed = [per_rank * 4 / seconds / 1e9 for seconds in (2e-3, 0.5e-3)]
    arrives = per_rank / (B300.scale_out_gb_s * 1e9 * constant("nic_efficiency").value) * 1e3
    rows = (
        one("KV of 32K tokens", 1.47, RAW * short.num_bytes / 1e9, "GB", 2, "arithmetic"),
        one("sent if every rank gets all, DCP4", 5.88, RAW * naive_bytes(short, 4) / 1e9, "GB", 2,
            "arithmetic", "4 × 1.47 as printed; 5.89 unrounded"),
        one("into each decode rank", 368, per_rank / 1e6, "MB", 0, "arithmetic"),
        one("KV of 500K tokens", 23, RAW * long.num_bytes / 1e9, "GB", 0, "arithmetic",
            "22.5 for 500,000 tokens; 23.0 for 512,000"),
        one("paths of CP8 → DCP4", 32, float((short.bytes_by_path > 0).sum()), "", 0,
            "arithmetic"),
        one("pages of 500K tokens", 7.8, 500_000 / 64 / 1e3, "thousand", 1, "arithmetic"),
        Row("transfer of 4K to 32K tokens", (0.5, 2.0), arrives, "ms", 1, "inconsistent",
            f"1.47 GB in 2 ms needs {needed[0]:,.0f} GB/s into four ranks, in 0.5 ms "
            f"{needed[1]:,.0f}; four links of the data sheet give 400. Ours is 32K tokens"),
    )  # fmt: skip
    text = (
        "Source: *Serving Macaron-V1 at Scale: Page-Level 2D KV Resharding*, GLM-5.2, prefill CP8 "
        "by layers, decode DCP4 by pages. Bytes are those of real transfer plans."
    )
    return Chapter("Bytes of the page-level reshard", text, rows)


def sparse_chapter() -> Chapter:
    """Footnotes and text of the GLM-5.3 post."""
    whole = MILLION * kv_bytes_per_token("glm-5.3")
    tp8, pcp8 = indexer_crossover(GLM, heads=8), indexer_crossover(GLM, heads=64, ranks=8)
    dp8, pcp = Deployment(dp=8, draft_tokens=3), Deployment(pcp=8, draft_tokens=3)
    free = capacity(GLM, H200, dp8).free_bytes / GIB
    rows = (
        one("KV of a token", 54_728, kv_bytes_per_token("glm-5.3"), "B", 0, "arithmetic"),
        one("KV of 1M tokens", 53.4, whole / GIB, "GiB", 1, "arithmetic"),
        one("of each of 8 ranks", 6.7, whole / GIB / 8, "GiB", 1, "arithmetic"),
        one("intensity, 8 heads", 26, model_intensity(GLM, 8), "FLOP/B", 0, "arithmetic"),
        one("intensity, 64 heads", 191, model_intensity(GLM, 64), "FLOP/B", 0, "arithmetic"),
        one("H200 ridge", 206, H200.ridge, "FLOP/B", 0, "arithmetic"),
        one("indexer overtakes, TP8", 32, tp8 / 1e3, "K tokens", 0, "arithmetic"),
        one("indexer overtakes, PCP8", 256, pcp8 / 1024, "K tokens", 0, "arithmetic",
            "printed as 8 × 32K; 8 × 32.3K is 258.6 thousand, 252.6 × 1,024"),
        one("free for KV on each H200", 15, free, "GiB", 0, "predicted", "weights by parameters"),
        one("PCP8 alone holds", 250, capacity(GLM, H200, pcp).tokens / 1e3, "K tokens", 0,
            "predicted", "printed as *roughly*"),
    )  # fmt: skip
    text = (
        "Source: *vLLM GLM-5.3 serving: PCP, DCP and Hybrid HiSparse on 16 H200s*. GLM-5.3 is read "
        "with the fields of GLM-5.2."
    )
    return Chapter("Memory and intensity of GLM-5.3", text, rows)


def reserve_of_seed_a() -> float:
    """Bytes beside weights and cache on B300 with which DCP1 holds 1.17M tokens: calibrated."""
    tokens = 1.17e6
    deployment = Deployment(tp=8, draft_tokens=DRAFTS, cache_dtype="fp8")
    room = capacity(GLM, B300, deployment, workspace_bytes=0)
    return room.free_bytes - tokens * room.rank_token_bytes


def _whole_keys() -> float:
    """The ratio for eight ranks that each keep the index keys and the draft's cache whole."""
    parts = kv_parts(GLM)
    sharded = sum(part.total for part in parts if part.name == "latent")
    total = sum(part.total for part in parts)
    return total / (sharded / 8 + total - sharded)


def capacity_chapter() -> Chapter:
    """Table 1 of the reshard post."""
    reserve = reserve_of_seed_a()

    def tokens(dcp: int, drafts: int = DRAFTS, workspace: float = reserve) -> float:
        deployment = Deployment(tp=8, dcp=dcp, draft_tokens=drafts, cache_dtype="fp8")
        return capacity(GLM, B300, deployment, workspace_bytes=workspace).tokens / 1e6

    rows = (
        one("DCP1, from the data sheet", 1.17, tokens(1, workspace=10 * GIB), "M tokens", 2,
            "predicted", "four LoRA experts and their graphs are not counted"),
        one("DCP1", 1.17, tokens(1), "M tokens", 2, "calibrated",
            f"{reserve / GIB:.0f} GiB of each rank are neither weights nor KV"),
        one("DCP4", 4.67, tokens(4), "M tokens", 2, "predicted",
            "the draft's pool is whole on every rank, which the printed 4 × leaves no room for"),
        one("DCP8", 9.34, tokens(8), "M tokens", 2, "predicted", "the same"),
        one("DCP1 without speculation", 2.0, tokens(1, drafts=0), "M tokens", 1, "predicted",
            "at DCP1 the draft's pool is 1.6 % of the KV; the gap must be graphs and buffers"),
        one("DCP8 over DCP1, SGLang #39330", 756_224 / 235_456, tokens(8) / tokens(1), "×", 2,
            "predicted", f"whole index keys on every rank there: with them {_whole_keys():.1f}"),
    )  # fmt: skip
    text = (
        "Source: the reshard post, Table 1: GLM-5.2 in FP8 on B300, TP8, four LoRA experts, EAGLE. "
        "Cache of 576 B a token and layer, 132 B an indexer key. Last row: GLM-5.3, Hopper."
    )
    return Chapter("Capacity against DCP", text, rows)


CONTEXT_OF_CLIFF = 39_000
"""Tokens of a session with which 1.17M hold 30: the middle of *20 to 40*, calibrated."""


def cliff_reports(dcp: int, users: Sequence[int]) -> list[Report]:
    """A closed loop of users on a decode engine of the reshard post."""
    tokens = 1.17e6 * (1 if dcp == 1 else 4)
    deployment = Deployment(tp=8, dcp=dcp, draft_tokens=DRAFTS, cache_dtype="fp8")
    page = deployment.virtual_page
    steps = EstimatedSteps(GLM, B300, deployment)
    decode = EngineSpec(steps, int(tokens // page), page, max_batch=512, acceptance=5.0)
    prefill = EngineSpec(ConstantSteps(0.0, 0.05), 10**6, 64, max_batch=512, chunk=65_536)
    work = Workload(
        num_requests=1, num_input=CONTEXT_OF_CLIFF - 1000, num_output=1000, spread=0.0, rate=1e9
    )
    cluster = Cluster((decode,), (prefill,), transfer_base=1e-3, num_devices=16)
    return [
        simulate(generate_trace(replace(work, num_requests=4 * count)), cluster, concurrency=count)
        for count in users
    ]


def cliff(dcp: int, users: Sequence[int]) -> int:
    """The most users of whom half wait for decode less than a tenth of an answer."""
    best = 0
    for count, report in zip(users, cliff_reports(dcp, users), strict=True):
        if report.decode_queue.p50 < 0.1 * (report.latency.p50 - report.decode_queue.p50):
            best = count
    return best


def cliff_chapter() -> Chapter:
    """Where a cluster starts to queue."""
    users = [*range(20, 60, 2), *range(60, 180, 5)]
    few, many = cliff_reports(1, [30])[0], cliff_reports(4, [110])[0]
    rows = (
        Row("users before queueing, DCP1", (20, 40), cliff(1, users[:20]), "", 0, "calibrated",
            f"sessions of {CONTEXT_OF_CLIFF:,} tokens"),
        Row("users before queueing, DCP4", (100, 200), cliff(4, users), "", 0, "predicted",
            "printed as *100+*"),
        one("output tokens/s, DCP1 → DCP4", 1800 / 800,
            many.output_throughput / few.output_throughput, "×", 2, "predicted",
            f"printed 800 → 1,800; ours {few.output_throughput:,.0f} → "
            f"{many.output_throughput:,.0f}, every user busy"),
    )  # fmt: skip
    text = (
        "Source: the reshard post, §1. Simulated: a closed loop of users with 1,000 tokens to "
        "generate, the published capacities, prompts of 50 ms (their prefix is cached)."
    )
    return Chapter("The cliff", text, rows)


def decode_chapter() -> Chapter:
    """Times of decode and prefill in the reshard post."""
    plain = [Deployment(tp=8, dcp=n, cache_dtype="fp8") for n in (1, 8)]
    times = [decode_step(GLM, B300, engine, 1, K32).seconds * 1e3 for engine in plain]
    eagle = replace(plain[1], draft_tokens=DRAFTS)
    fast = decode_step(GLM, B300, eagle, 1, K32).seconds * 1e3 / 5
    prompts = [prefill_step(GLM, B300, SPLIT, n, 0).seconds for n in (1024, K32)]
    rest = 0.38 - prompts[0]
    rows = (
        one("TPOT at DCP8", 30.8, times[1], "ms", 1, "predicted", "load and context not printed"),
        one("TPOT at DCP8 with EAGLE", 8.6, fast, "ms", 1, "predicted", "5 tokens accepted"),
        one("the speed-up", 3.6, times[1] / fast, "×", 1, "predicted"),
        Row("DCP1 → DCP8", (5, 15), (times[1] / times[0] - 1) * 100, "%", 0, "predicted"),
        one("TTFT of 1K tokens", 0.38, prompts[0], "s", 2, "predicted"),
        one("TTFT of 1K tokens", 0.38, prompts[0] + rest, "s", 2, "calibrated",
            f"{rest:.2f} s outside the prompt's step"),
        one("TTFT of 32K tokens", 1.7, prompts[1] + rest, "s", 1, "predicted"),
    )  # fmt: skip
    text = "Source: the reshard post, Table 1 and §5.3. One sequence of 32K tokens is assumed."
    return Chapter("Times on B300", text, rows)


def gather_overheads(base_at_64k: float | None = None) -> list[float]:
    """What gathering a shared cache adds to a chunk of 2K tokens at 64K and 248K, in percent."""
    found: list[float] = []
    steps: list[StepCost] = []
    for context in (65_536, 248_000):
        shared, whole = (
            prefill_step(GLM, H200, engine, 2048, context - 2048)
            for engine in (SHARED, Deployment(pcp=8, draft_tokens=3))
        )
        steps.append(whole)
        base = whole.seconds
        if base_at_64k is not None:
            base += base_at_64k - steps[0].seconds
        found.append((shared.seconds - whole.seconds) / base * 100)
    return found


def serving_chapter() -> Chapter:
    """Prefill overheads and AgentX results of the GLM-5.3 post."""
    plain = gather_overheads()
    first = prefill_step(GLM, H200, Deployment(pcp=8, draft_tokens=3), 2048, 63_488).seconds
    calibrated = gather_overheads(plain[0] * first / 6)
    dp8, both = (
        evaluate_agents(engine, 16) for engine in (Deployment(dp=8, draft_tokens=3), SHARED)
    )
    loaded = evaluate_agents(SHARED, 64)
    rows = (
        one("gathering at 64K tokens", 6, plain[0], "%", 0, "predicted",
            "our step is too short, so its share is too large"),
        one("gathering at 248K tokens", 15, plain[1], "%", 0, "predicted", "the same"),
        one("gathering at 64K tokens", 6, calibrated[0], "%", 0, "calibrated",
            "the rest of the step made as long as 6 % says"),
        one("gathering at 248K tokens", 15, calibrated[1], "%", 0, "predicted",
            "from there: the same bytes, no overlap"),
        Row("interactivity, PCP8 DCP8 over DP8", (1.7, 3.2), both[0] / dp8[0], "×", 1,
            "predicted", "16 users; the post compares at equal throughput"),
        Row("median TTFT, PCP8 DCP8", (0.8, 0.9), both[1], "s", 1, "predicted", "mean, 16 users"),
        Row("median TTFT, DP8", (1.5, 5.2), dp8[1], "s", 1, "predicted", "mean, 16 users"),
        one("tokens/s and GPU, 64 users", 8340, loaded[2], "", 0, "predicted",
            "HiSparse as host memory of 48 GiB a rank that costs nothing to read"),
        one("tokens/s and user, 64 users", 29.6, loaded[0], "", 1, "predicted",
            "printed is the 90th percentile of a trace, ours a mean"),
    )  # fmt: skip
    text = (
        "Source: the GLM-5.3 post, AgentX on 2 × 8 H200 with MTP3 at 2.99 tokens a step. Requests "
        "as in public agent traces: 103,700 tokens in, 440 out, 96 % seen before, 40 s between "
        "turns (pauses cut at 300 s, mean); decode on eight data-parallel ranks."
    )
    return Chapter("Serving agents on 16 H200", text, rows)


def evaluate_agents(prefill: Deployment, users: int) -> tuple[float, float, float]:
    """Tokens/s and user, mean TTFT and tokens/s and device of the GLM-5.3 post's cluster."""
    demand = Demand(
        context=142_000,
        num_input=103_700,
        num_output=440,
        hit_rate=0.96,
        concurrency=users,
        think=40.0,
    )
    setting = Setting(GLM, H200, demand, host_gib=512)
    decode = Deployment(dp=8, draft_tokens=3)
    rooms = [capacity(GLM, H200, engine, context=demand.context) for engine in (prefill, decode)]
    on_host = int(48 * GIB // rooms[1].page_bytes)
    candidate = Candidate(decode, 1, prefill, 1)
    point = evaluate(setting, candidate, rooms[0], replace(rooms[1], num_pages=on_host))
    return point.interactivity, point.ttft, point.device_throughput
