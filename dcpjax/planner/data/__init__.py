"""Constants as JSON files, each value with its source and kind."""

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def read_data(name: str) -> dict[str, Any]:
    """The contents of ``name``.json in this folder. Shared between callers: not to be changed."""
    return json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text("utf-8"))
