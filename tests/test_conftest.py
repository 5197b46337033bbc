"""The canaries of the test configuration: each strictness that other tests rely on does bite."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dcpjax

CONFTEST = Path(__file__).with_name("conftest.py")


def test_there_are_eight_cpu_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8
