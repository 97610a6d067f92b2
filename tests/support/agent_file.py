"""Files for OpenRLHF's `--train.agent_func_path`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_as_openrlhf_does(path: Path) -> ModuleType:
    """As `openrlhf/trainer/ray/vllm_engine.py` does: executed, but not entered in sys.modules."""
    spec = importlib.util.spec_from_file_location("agent_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
