"""What can go wrong between a model and its NEFFs.

NeuronError
├── TargetError          an unknown target, or a setting that it cannot have
├── LoweringError        a step that has no per-device program
├── RuleError            a program breaks rules of the compiler or the hardware
├── CompilerError        no compiler, or one that failed
├── ManifestError        compiled files that do not belong to this program, or are damaged
└── EnvironmentSettingError   what programs run with is missing: a library, or nodes for all ranks
"""

from dcpjax.errors import DcpjaxError


class NeuronError(DcpjaxError):
    """Root of this package's errors."""


class TargetError(NeuronError):
    """The target is unknown, or does not have what a setting asks for."""


class LoweringError(NeuronError):
    """A function cannot become one program for all ranks."""


class RuleError(NeuronError):
    """A program breaks rules that the compiler or the hardware has."""


class CompilerError(NeuronError):
    """neuronx-cc is not there, or did not compile a program."""


class ManifestError(NeuronError):
    """Compiled programs are damaged, or were made for something else."""


class EnvironmentSettingError(NeuronError):
    """Programs cannot run here: no library for it, or nodes that do not share the ranks evenly."""
