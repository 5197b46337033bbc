"""The only way to the kernels: imports them when one is first called."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from neuron.nki.errors import NkiMissingError

NKI_VERSION = "0.6"
SDK_VERSION = "2.32"


def load_kernel(module: str, name: str) -> Callable[..., Any]:
    """A kernel of ``neuron.nki.kernels``.

    Raises:
        NkiMissingError: nki is not installed, or is the guard that PyPI has under its name, which
            raises ImportError when it can be imported at all.
    """
    try:
        import_module("nki.isa")
    except ImportError as error:
        raise NkiMissingError(
            "the kernels need the nki package of the AWS Neuron package index: "
            "pip install nki --extra-index-url <that index>; PyPI's nki is an empty guard",
            needed=f"nki {NKI_VERSION} (Neuron SDK {SDK_VERSION})",
            reason=str(error),
        ) from error
    return getattr(import_module(f"neuron.nki.kernels.{module}"), name)


def launch(module: str, name: str, lnc: int) -> Callable[..., Any]:
    """The kernel on the ``lnc`` physical cores of a logical one; arguments as the kernel's."""
    kernel: Any = load_kernel(module, name)
    return kernel[lnc] if lnc > 1 else kernel
