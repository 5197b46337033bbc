"""How one engine spreads a model over its devices, and what of a cache each rank then holds."""

from dataclasses import dataclass
from typing import Literal

from dcpjax.cache.widths import PartWidth
from dcpjax.errors import ConfigError, LayoutError, MeshError, UnsupportedCombination
from dcpjax.layout import KVPlacement, place_part
from dcpjax.planner.cache_parts import INDEXER, PLAIN, auto_dtype
from dcpjax.planner.models import ModelShape

PrefillKV = Literal["replicated", "sharded", "layer_split"]

LAYER_SPLIT = "layer split"
"""In a label: PCP ranks each keep some layers."""


@dataclass(frozen=True)
class Deployment:
    """The ranks of one engine. ``dp`` copies of the attention, each with its own sequences.

    Experts are spread over all ranks; everything else over the ``tp`` ranks of a copy.

    Attributes:
        tp: tensor parallel size, DCP ranks included where ``pcp`` is 1.
        dcp: ranks that share the tokens of a sequence; with ``pcp`` it is 1, pcp or tp * pcp.
        pcp: ranks that share the tokens of a prompt.
        prefill_kv: where a PCP engine keeps the cache.
        prefill_gather: "q": without PCP, each DCP rank projects its own tokens of a prompt.
        index_kv: whether ranks that share tokens each keep the indexer's keys of all of them.
        page_size: tokens of one page of one rank.
        cache_dtype: of cached values; "auto": as :func:`~dcpjax.planner.cache_parts.auto_dtype`.
        draft_tokens: tokens that the draft layer proposes in each step; 0: no draft.

    Raises:
        ConfigError: sizes below 1, or that do not fit together.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    dp: int = 1
    prefill_kv: PrefillKV = "replicated"
    exchange: Literal["ag_rs", "a2a"] = "ag_rs"
    page_size: int = 64
    cache_dtype: str = "auto"
    draft_tokens: int = 0
    prefill_gather: Literal["none", "q"] = "none"
    index_kv: Literal["sharded", "replicated"] = "sharded"

    def __post_init__(self) -> None:
        for name in ("tp", "dcp", "pcp", "dp", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1", **{name: getattr(self, name)})
        if self.draft_tokens < 0:
            raise ConfigError("draft_tokens is at least 0", draft_tokens=self.draft_tokens)
        if self.pcp == 1 and self.tp % self.dcp:
            raise MeshError("dcp divides tp", tp=self.tp, dcp=self.dcp)
        if self.pcp > 1 and self.dcp not in (1, self.pcp, self.tp * self.pcp):
            raise MeshError(
                "with pcp, dcp is 1, pcp or tp * pcp", tp=self.tp, pcp=self.pcp, dcp=self.dcp
            )
        for is_refused, rule, names in self._rules():
            if is_refused:
                values = {name: getattr(self, name) for name in names}
                raise UnsupportedCombination(rule, **values)

    def _rules(self) -> list[tuple[bool, str, tuple[str, ...]]]:
        """Whether a rule is broken, the rule, and what it is about."""
        has_pcp = self.pcp > 1
        return [
            (
                has_pcp and (self.prefill_kv == "sharded") != (self.dcp > 1),
                "with pcp, prefill_kv is 'sharded' exactly where dcp is above 1",
                ("prefill_kv", "dcp"),
            ),
            (
                not has_pcp and self.prefill_kv != "replicated",
                "prefill_kv names where PCP ranks keep the cache, so it needs pcp > 1",
                ("prefill_kv", "pcp"),
            ),
            (
                has_pcp and self.exchange == "a2a",
                "exchange='a2a' exchanges query heads, and PCP ranks have the same ones",
                ("exchange", "pcp"),
            ),
            (
                self.prefill_gather == "q" and (has_pcp or self.dcp == 1),
                "prefill_gather='q' splits prompts over DCP ranks with no PCP ranks among them",
                ("dcp", "pcp"),
            ),
            (
                self.index_kv == "replicated" and self.prefill_kv == "layer_split",
                "index_kv='replicated' keeps the indexer's keys of all layers on each rank, and "
                "prefill_kv='layer_split' those of its own layers",
                ("index_kv", "prefill_kv"),
            ),
        ]

    @property
    def num_devices(self) -> int:
        return self.tp * self.pcp * self.dp

    @property
    def virtual_page(self) -> int:
        """Tokens of a sequence that one page id stands for, the grain of the prefix cache."""
        return self.page_size * self.dcp

    @property
    def weight_dcp(self) -> int:
        """DCP ranks among the ranks that share the weights."""
        return max(1, self.dcp // self.pcp)

    @property
    def head_groups(self) -> int:
        """Ranks of one PCP rank that hold different heads."""
        return self.tp // self.weight_dcp

    def keeps_whole(self, part: PartWidth) -> bool:
        """Whether every rank that shares tokens has this part of all of them."""
        return part.is_draft or (self.index_kv == "replicated" and part.name == INDEXER)

    def stored_dtype(self, model: ModelShape) -> str:
        """Of cached values."""
        return auto_dtype(model) if self.cache_dtype == "auto" else self.cache_dtype

    def part_placement(self, part: PartWidth, model: ModelShape) -> KVPlacement:
        """Which rank of one copy holds what of a part.

        Raises:
            UnsupportedCombination: tokens that tensor parallel ranks of PCP ranks share, of a cache
                of several heads.
            MeshError: neither of head groups and heads divides the other.
        """
        if model.latent is None and self.pcp > 1 and self.dcp > self.pcp:
            raise UnsupportedCombination(
                "tokens are spread over PCP and tensor parallel ranks only where all heads share "
                "one latent",
                model=model.name,
                dcp=self.dcp,
                pcp=self.pcp,
            )
        try:
            return place_part(
                self.tp,
                self.dcp,
                self.pcp,
                layers=part.layers,
                kv_heads=part.heads,
                page_size=self.page_size,
                interleave=self.page_size,
                is_whole=self.keeps_whole(part),
                splits_layers=self.prefill_kv == "layer_split",
            )
        except LayoutError as error:
            raise MeshError(error.rule, **error.values) from error

    def label(self) -> str:
        """Its sizes: ``TP8 DCP8``, ``PCP8 layer split``; ``parse_engines`` reads them."""
        sizes = [("DP", self.dp), ("PCP", self.pcp), ("TP", self.tp), ("DCP", self.dcp)]
        words = [f"{name}{size}" for name, size in sizes if size > 1] or ["TP1"]
        if self.prefill_kv == "layer_split":
            words.append(LAYER_SPLIT)
        return " ".join(words)

    def engine_settings(self, model: ModelShape) -> dict[str, object]:
        """The same as settings of our engine, whether it takes them or not."""
        settings: dict[str, object] = {
            "tensor_parallel_size": self.tp,
            "decode_context_parallel_size": self.dcp,
            "prefill_context_parallel_size": self.pcp,
            "cp_kv_cache_interleave_size": self.page_size,
            "block_size": self.page_size,
        }
        if self.dp > 1:
            settings["data_parallel_size"] = self.dp
        dtype = self.stored_dtype(model)
        if dtype != PLAIN:
            settings["kv_cache_dtype"] = dtype
        if self.prefill_kv != "replicated":
            settings["prefill_kv"] = self.prefill_kv
        if self.exchange != "ag_rs":
            settings["dcp_comm_backend"] = self.exchange
        if self.prefill_gather != "none":
            settings["prefill_gather"] = self.prefill_gather
        if self.index_kv != "sharded":
            settings["index_kv"] = self.index_kv
        return settings
