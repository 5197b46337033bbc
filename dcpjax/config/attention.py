"""How attention is computed, where there is more than one way to the same result."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.config.checks import check_types
from dcpjax.errors import ConfigError


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
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ConfigError(
                f"unknown attention setting{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
                known=sorted(known),
            )
        return cls(**settings)
