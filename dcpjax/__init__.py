"""dcpjax: prefill and decode engines that shard the KV cache each in its own way.

Dimension letters in array types; upper case is the whole extent, lower case one rank's share::

    B  sequences of a batch      T  query tokens of a segment     S  current key tokens
    H  query heads               K  KV heads                      D  key width (Dv value width)
    E  hidden size               F  feed-forward size             V  vocabulary
    P  tokens of a page          N  ranks that share the tokens   L  layers

Importing the package, ``dcpjax.layout`` or the host logic does not import JAX.
"""

from typing import TYPE_CHECKING, Any

from dcpjax.engine.request import FinishReason as FinishReason
from dcpjax.engine.request import SamplingParams as SamplingParams

if TYPE_CHECKING:
    from dcpjax.llm import LLM as LLM
    from dcpjax.llm import RequestOutput as RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "FinishReason", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Load what needs JAX only when it is asked for."""
    if name in ("LLM", "RequestOutput"):
        from dcpjax import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'dcpjax' has no attribute {name!r}")
