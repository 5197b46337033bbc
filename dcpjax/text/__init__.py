"""Text to token ids and back: tokenizers, chat templates, incremental detokenising, stop strings.

Knows nothing of models or arrays.
"""

from dcpjax.text.stream import TextDelta as TextDelta
from dcpjax.text.stream import TextStream as TextStream
from dcpjax.text.tokenizer import Tokenizer as Tokenizer
from dcpjax.text.tokenizer import load_tokenizer as load_tokenizer
