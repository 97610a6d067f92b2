"""Eight rollouts of three tool calls each, from the example rows of two of NeMo Gym's environments.

SmolLM2-135M calls no tool by itself and ends no call by itself. So calls are required, and the tools' schemas bounded:
the engine masks what would leave them. With calls required an agent would go on for ever; its `max_steps` ends it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALLS_PER_ROLLOUT = 3
TEMPERATURE = 1.0
MAX_CONTEXT_TOKENS = 8192
"""Of the engine. The rows of example_multi_step have prompts of 3,000 tokens."""

_MULTI_STEP, _SINGLE_CALL = "example_multi_step", "example_single_tool_call"
_ROWS = {_SINGLE_CALL: 5, _MULTI_STEP: 3}
"""How many rows of each environment; together eight."""
_MAX_OUTPUT_TOKENS = 768
"""Enough for any call that the schemas and the bridge's limit on white space allow, if every character is a token."""

GYM_CONFIGS = (
    *(f"resources_servers/{name}/configs/{name}.yaml" for name in _ROWS),
    "responses_api_models/vllm_model/configs/vllm_model.yaml",
)
GYM_AGENT = f"{_SINGLE_CALL}_simple_agent"
GYM_OVERRIDES = tuple(
    f"++{name}_simple_agent.responses_api_agents.simple_agent.max_steps={CALLS_PER_ROLLOUT}" for name in _ROWS
)

_BOUNDED_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {"city": {"type": "string", "minLength": 2, "maxLength": 24}},
    "get_synonym_value": {"synonym": {"type": "string", "minLength": 2, "maxLength": 24}},
    "extract_synonym_values": {
        "synonym_values": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "minItems": 1,
            "maxItems": 4,
        }
    },
}
"""The properties of each tool, all required."""

TOOL_TEMPLATE = Path(__file__).with_name("chatml_tools.jinja")
"""ChatML with tools as Hermes and Qwen write them. SmolLM2's own template leaves tools and tool calls out."""


def rows(gym_venv: Path) -> list[dict[str, Any]]:
    """Return the eight rows, as `POST /run` takes them."""
    (servers,) = gym_venv.glob("lib/python3*/site-packages/resources_servers")
    made: list[dict[str, Any]] = []
    for environment, count in _ROWS.items():
        lines = (servers / environment / "data" / "example.jsonl").read_text().splitlines()
        made += [_with_required_calls(json.loads(line), f"{environment}_simple_agent") for line in lines[:count]]
    return made


def _with_required_calls(row: dict[str, Any], agent: str) -> dict[str, Any]:
    params = row["responses_create_params"]
    tools = [
        {
            **tool,
            "parameters": {
                "type": "object",
                "properties": _BOUNDED_SCHEMAS[tool["name"]],
                "required": list(_BOUNDED_SCHEMAS[tool["name"]]),
                "additionalProperties": False,
            },
        }
        for tool in params["tools"]
    ]
    changes = {
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": TEMPERATURE,
        "max_output_tokens": _MAX_OUTPUT_TOKENS,
    }
    return {**row, "agent_ref": {"name": agent}, "responses_create_params": {**params, **changes}}


def model_with_tools(model_directory: Path, directory: Path) -> Path:
    """Make `directory` hold the model, its weights linked, with `TOOL_TEMPLATE` for its template; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model_directory.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, directory)
        elif file.suffix == ".safetensors":
            (directory / file.name).symlink_to(file.absolute())
    shutil.copy(TOOL_TEMPLATE, directory / "chat_template.jinja")
    return directory
