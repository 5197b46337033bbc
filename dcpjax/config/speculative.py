"""How an engine speculates: who drafts, how many tokens, and how drafts are accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dcpjax.config.checks import COUNT, check_names, check_types, type_words
from dcpjax.errors import ConfigError, UnsupportedCombination

DraftMethod = Literal["ngram", "mtp"]
RejectionSampleMethod = Literal["strict", "synthetic"]

_LONGEST_LOOKUP, _SHORTEST_LOOKUP = 4, 2


@dataclass(frozen=True)
class SpeculativeConfig:
    """How an engine speculates. The names are those of vLLM's ``--speculative-config``.

    Attributes:
        method: ngram proposes what followed the last tokens where the sequence had them before;
            mtp asks the draft layer of the model.
        num_speculative_tokens: drafts that one step verifies at most, per sequence.
        prompt_lookup_max, prompt_lookup_min: ngram alone: how many last tokens have to be found
            again at best, and at least. Default: 4 and 2.
        rejection_sample_method: strict keeps the tokens those of an engine without speculation;
            synthetic accepts drafts that may be wrong, and is for benchmarks only.
        synthetic_acceptance_length: tokens per verification that synthetic yields on average,
            the one behind the drafts included.
    """

    method: DraftMethod
    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    rejection_sample_method: RejectionSampleMethod = "strict"
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        COUNT.check(self, "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        self._check_lookup()
        self._check_acceptance()

    @property
    def width(self) -> int:
        """Tokens of a sequence that one step computes: its last one, and drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def longest_lookup(self) -> int:
        """Last tokens that are looked up at best."""
        if self.prompt_lookup_max is not None:
            return self.prompt_lookup_max
        return max(_LONGEST_LOOKUP, self.prompt_lookup_min or 0)

    @property
    def shortest_lookup(self) -> int:
        """Last tokens that are looked up at least."""
        if self.prompt_lookup_min is not None:
            return self.prompt_lookup_min
        return min(_SHORTEST_LOOKUP, self.longest_lookup)

    def _check_lookup(self) -> None:
        lookup = {
            "prompt_lookup_max": self.prompt_lookup_max,
            "prompt_lookup_min": self.prompt_lookup_min,
        }
        if self.method != "ngram" and any(value is not None for value in lookup.values()):
            raise UnsupportedCombination(
                "prompt_lookup_max and prompt_lookup_min belong to the method 'ngram'",
                method=self.method,
                **lookup,
            )
        if self.shortest_lookup > self.longest_lookup:
            raise ConfigError("prompt_lookup_min is at most prompt_lookup_max", **lookup)

    def _check_acceptance(self) -> None:
        length = self.synthetic_acceptance_length
        if (self.rejection_sample_method == "synthetic") != (length is not None):
            raise UnsupportedCombination(
                "synthetic_acceptance_length is given together with "
                "rejection_sample_method='synthetic'",
                rejection_sample_method=self.rejection_sample_method,
                synthetic_acceptance_length=length,
            )
        if length is not None and not 1 <= length <= self.width:
            raise ConfigError(
                "synthetic_acceptance_length is at least 1, no draft accepted, and at most "
                "num_speculative_tokens + 1, all of them",
                synthetic_acceptance_length=length,
                num_speculative_tokens=self.num_speculative_tokens,
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "SpeculativeConfig":
        """Build from a JSON object; a name that is not a setting is refused."""
        check_names(cls, settings, "speculation")
        if "method" not in settings:
            raise ConfigError(f"speculative_config needs a method: {type_words(DraftMethod)}")
        if "num_speculative_tokens" not in settings:
            raise ConfigError("speculative_config needs num_speculative_tokens, at least 1")
        return cls(**settings)
