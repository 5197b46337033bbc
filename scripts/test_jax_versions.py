"""Run the tests of the programs for Neuron on each line of JAX releases, in environments of its own.

Neuron's plugin stops at JAX 0.10.0, and its documents name 0.9.0.1 as the other safe pin; GPUs run
newer ones. The environments stay in .jax-versions/, so that only the first run installs.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".jax-versions"
VERSIONS = {
    "0.9.0.1": ("jax==0.9.0.1", "jaxlib==0.9.0.1"),
    "0.10.0": ("jax==0.10.0", "jaxlib==0.10.0"),
    "newest": ("jax<0.13", "jaxlib<0.13"),  # that this Python can have
}
TOOLS = ("pytest>=8.3", "pytest-xdist>=3.6", "hypothesis>=6.120", "beartype>=0.20", "protobuf>=5")
TESTS = ("test_lowering.py", "test_cpu.py", "test_programs.py", "lint")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", choices=[[], *VERSIONS], help="default: all")
    wanted = parser.parse_args().versions or list(VERSIONS)
    failed = [version for version in wanted if not passes(version)]
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(wanted)}")
    return 1 if failed else 0


def passes(version: str) -> bool:
    """Whether the tests pass there; what they print is shown."""
    python = interpreter(version)
    shown = subprocess.run(
        [python, "-c", "import jax, sys; print('JAX', jax.__version__, 'Python', sys.version[:6])"],
        capture_output=True,
        text=True,
        check=True,
    )
    print(shown.stdout.strip(), flush=True)
    tests = [f"tests/neuron/{name}" for name in TESTS]
    return subprocess.run([python, "-m", "pytest", "-n", "2", *tests], cwd=ROOT).returncode == 0


def interpreter(version: str) -> Path:
    """Python of the environment with this JAX, which is made where it is missing."""
    folder = FOLDER / version
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", *VERSIONS[version], *TOOLS]
        subprocess.run([*install, "-e", ".[server]"], cwd=ROOT, check=True)
        done.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
