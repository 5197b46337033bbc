"""Logits to tokens: see :mod:`dcpjax.sampling.sampler`.

There is no sort, top-k, scan along the vocabulary or branch in this package: a sort of 49k values
takes milliseconds on a CPU, and Neuron compiles none of the others. All of it is float32, has
static shapes and runs on one device.
"""

from dcpjax.sampling.largest import NUM_LOGPROBS as NUM_LOGPROBS
from dcpjax.sampling.sampler import SampleResult as SampleResult
from dcpjax.sampling.sampler import SamplingInputs as SamplingInputs
from dcpjax.sampling.sampler import SamplingState as SamplingState
from dcpjax.sampling.sampler import greedy as greedy
from dcpjax.sampling.sampler import init_state as init_state
from dcpjax.sampling.sampler import reset_rows as reset_rows
from dcpjax.sampling.sampler import sample as sample
