"""NKI kernels for attention on Trainium, each beside the JAX function that it must equal.

``README.md`` in this folder says how they are laid out, why, and what is unproven. Importing this
package needs no Neuron software; calling one of its functions needs the ``nki`` package.
"""

from neuron.nki.attention import context_attention as context_attention
from neuron.nki.attention import decode_attention as decode_attention
from neuron.nki.errors import NkiError as NkiError
from neuron.nki.errors import NkiMissingError as NkiMissingError
from neuron.nki.errors import NkiShapeError as NkiShapeError
from neuron.nki.merge import merge_partials as merge_partials
from neuron.nki.pairs import PAIRS as PAIRS
