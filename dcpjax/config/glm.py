"""The shape of a model with a latent cache: GLM-5 and the DeepSeek-V3 family."""

import math
from dataclasses import dataclass

from dcpjax.config.checks import COUNT, POSITIVE
from dcpjax.config.model import LlamaConfig
from dcpjax.errors import ConfigError


@dataclass(frozen=True)
class YarnScaling:
    """How YaRN stretches rotary frequencies (arXiv 2309.00071), with DeepSeek's two scales.

    ``mscale_all_dim`` also scales the softmax, see :attr:`GlmConfig.softmax_scale`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ConfigError(
                "the rope scaling factor is a finite number of at least 1", factor=self.factor
            )
        COUNT.check(self, "original_max_position")
        POSITIVE.check(self, "beta_fast", "beta_slow")

    def attention_scale(self, mscale: float) -> float:
        """``0.1 · mscale · ln(factor) + 1``."""
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer, which chooses the tokens that a query attends to.

    Attributes:
        top_k: tokens chosen for each query.
        full_layers: layers that have an indexer of their own, ascending; the others use what the
            last of these before them has chosen.
        is_rope_interleaved: rotary pairs are neighbours (GLM), else halves (DeepSeek-V3.2).
        shares_with_drafts: later draft tokens use what was chosen for the first.
    """

    num_heads: int
    head_dim: int
    top_k: int
    full_layers: tuple[int, ...]
    is_rope_interleaved: bool = True
    shares_with_drafts: bool = False

    def __post_init__(self) -> None:
        COUNT.check(self, "num_heads", "head_dim", "top_k")
        if not self.full_layers or self.full_layers[0] != 0:
            raise ConfigError(
                "the first layer has an indexer of its own: there is none before it to share",
                full_layers=self.full_layers,
            )


@dataclass(frozen=True)
class ExpertsConfig:
    """Routed experts, and the shared one beside them.

    Attributes:
        layers: layers with experts, ascending; the others have a dense MLP.
        width: inner width of one expert.
        num_groups, groups_per_token: experts are chosen among the best groups alone.
        scale: of the routed experts' sum.
        is_normalised: the chosen experts' weights sum to one.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_per_token: int
    width: int
    num_shared: int = 1
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    is_normalised: bool = True

    def __post_init__(self) -> None:
        COUNT.check(self, "num_experts", "num_per_token", "width")
        COUNT.check(self, "num_groups", "groups_per_token")
        if self.num_shared < 0:
            raise ConfigError("num_shared is at least 0", num_shared=self.num_shared)
        if self.num_experts % self.num_groups:
            raise ConfigError(
                "the number of expert groups divides that of the experts",
                num_experts=self.num_experts,
                num_groups=self.num_groups,
            )
        if self.groups_per_token > self.num_groups:
            raise ConfigError(
                "a token chooses among at most all expert groups",
                groups_per_token=self.groups_per_token,
                num_groups=self.num_groups,
            )
        group = self.num_experts // self.num_groups
        if group < 2 and self.num_groups > 1:
            raise ConfigError("the score of an expert group is of its two best", group_size=group)
        if self.num_per_token > self.groups_per_token * group:
            raise ConfigError(
                "a token has at most as many experts as there are in its groups",
                num_per_token=self.num_per_token,
                experts_to_choose_from=self.groups_per_token * group,
            )


@dataclass(frozen=True)
class GlmConfig:
    """One decoder with multi-head latent attention (MLA).

    What is cached of a token is a latent of ``kv_lora_rank`` values, normalised, and a key of
    ``qk_rope_head_dim`` values, rotated; both are shared by all heads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    experts: ExpertsConfig | None = None
    indexer: IndexerConfig | None = None
    num_draft_layers: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    is_rope_interleaved: bool = True
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        COUNT.check(self, "vocab_size", "hidden_size", "intermediate_size", "num_layers")
        COUNT.check(self, "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
        COUNT.check(self, "qk_rope_head_dim", "v_head_dim", "max_position_embeddings")
        POSITIVE.check(self, "rms_norm_eps", "rope_theta")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                "rotary embedding needs an even head size", qk_rope_head_dim=self.qk_rope_head_dim
            )
        if self.indexer is not None and self.indexer.head_dim < self.qk_rope_head_dim:
            raise ConfigError(
                "the indexer rotates the first qk_rope_head_dim columns of its heads",
                index_head_dim=self.indexer.head_dim,
                qk_rope_head_dim=self.qk_rope_head_dim,
            )
        if self.num_draft_layers not in (0, 1):
            raise ConfigError(
                "at most one draft layer is understood", num_draft_layers=self.num_draft_layers
            )
        self._check_layers("full_layers", self.indexer and self.indexer.full_layers)
        self._check_layers("expert layers", self.experts and self.experts.layers)

    def _check_layers(self, name: str, layers: tuple[int, ...] | None) -> None:
        layers = layers or ()
        is_ascending = list(layers) == sorted(set(layers))
        if not is_ascending or any(not 0 <= layer < self.num_layers for layer in layers):
            raise ConfigError(
                f"{name} are ascending layers of the model",
                layers=layers,
                num_layers=self.num_layers,
            )

    @property
    def num_kv_heads(self) -> int:
        """All heads read the same latent."""
        return 1

    @property
    def latent_width(self) -> int:
        """Values cached of a token in each layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Of the attention's scores; YaRN's ``mscale_all_dim`` is squared: for q and for k."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        yarn = self.rope_scaling
        if yarn is None or not yarn.mscale_all_dim:
            return scale
        return scale * yarn.attention_scale(yarn.mscale_all_dim) ** 2

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer chooses tokens itself. The draft layer is layer ``num_layers``."""
        return self.indexer is not None and (
            layer in self.indexer.full_layers or layer == self.num_layers
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts; the draft layer has, wherever any other has."""
        return self.experts is not None and (
            layer in self.experts.layers or layer == self.num_layers
        )


ModelConfig = LlamaConfig | GlmConfig
