"""The vLLM adapter, and the only room that imports vllm.

`adapter` implements the engine port over an in-process `AsyncLLM`. Calls reach vLLM by one of two paths with identical
results: `direct_path`, for the versions whose internals it was verified with, or `public_path`, for all others.
`parameters` translates terms; `guard` ends vLLM's processes where the sidecar could not.
"""

from tokentape_sidecar.vllm_engine.adapter import VllmEngine

__all__ = ["VllmEngine"]
