"""How attention is computed, where there is more than one way to the same result."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.config.checks import check_names, check_types


@dataclass(frozen=True)
class AttentionConfig:
    """How attention is computed. The name is that of vLLM's ``--attention-config``.

    Attributes:
        sparse_mla_force_mqa: prompts of a model with a latent cache attend to latents as they are,
            which all heads share, as decode steps do. False: to keys and values of each head, made
            from the latents, wherever every token before the query counts. None: as False, where
            steps have such a form and it takes less computing.
    """

    sparse_mla_force_mqa: bool | None = None

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "AttentionConfig":
        """Build from a JSON object; a name that is not a setting is refused."""
        check_names(cls, settings, "attention")
        return cls(**settings)
