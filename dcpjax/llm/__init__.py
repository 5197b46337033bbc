"""Text in, text out: the offline interface and the text side that the server shares with it."""

from dcpjax.llm.offline import LLM as LLM
from dcpjax.llm.offline import CompletionOutput as CompletionOutput
from dcpjax.llm.offline import RequestOutput as RequestOutput
from dcpjax.llm.offline import load_engine as load_engine
from dcpjax.llm.offline import load_follower as load_follower
from dcpjax.llm.sequence import TextSide as TextSide
