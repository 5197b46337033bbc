"""Frozen settings and their validation. Knows nothing about arrays or devices."""

from collections.abc import Callable

from dcpjax.config.attention import AttentionConfig as AttentionConfig
from dcpjax.config.checks import has_type as has_type
from dcpjax.config.checks import type_words as type_words
from dcpjax.config.distributed import DistributedConfig as DistributedConfig
from dcpjax.config.engine import CommBackend as CommBackend
from dcpjax.config.engine import Device as Device
from dcpjax.config.engine import DTypeName as DTypeName
from dcpjax.config.engine import EngineConfig as EngineConfig
from dcpjax.config.engine import LoadFormat as LoadFormat
from dcpjax.config.engine import PrefillGather as PrefillGather
from dcpjax.config.glm import ExpertsConfig as ExpertsConfig
from dcpjax.config.glm import GlmConfig as GlmConfig
from dcpjax.config.glm import IndexerConfig as IndexerConfig
from dcpjax.config.glm import ModelConfig as ModelConfig
from dcpjax.config.glm import YarnScaling as YarnScaling
from dcpjax.config.model import LlamaConfig as LlamaConfig
from dcpjax.config.model import RopeScaling as RopeScaling
from dcpjax.config.neuron_rules import broken_neuron_rules as broken_neuron_rules
from dcpjax.config.speculative import DraftMethod as DraftMethod
from dcpjax.config.speculative import SpeculativeConfig as SpeculativeConfig
from dcpjax.config.transfer import KVConnector as KVConnector
from dcpjax.config.transfer import KVRole as KVRole
from dcpjax.config.transfer import KVTransferConfig as KVTransferConfig
from dcpjax.config.transfer import LoadFailurePolicy as LoadFailurePolicy

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` while an engine loads and compiles."""
