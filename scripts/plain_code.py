"""Machine code that is made in a third of the time, for programs that run a few times or never."""

from importlib.metadata import version


def plain_code() -> list[str]:
    """Flags for XLA, to be set before JAX starts.

    The passes that place collectives and copies are the same; some operations are in other fusions.
    """
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    release = tuple(map(int, version("jaxlib").split(".")[:2]))
    if release < (0, 11):  # a flag that a release does not know ends the process
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags
