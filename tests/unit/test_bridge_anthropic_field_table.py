"""The Messages API's table in bridge/README.md: every field of its requests is in it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.field_table import read_table
from support.message_fields import EXAMPLES, ROUTES, SECTION
from tokentape_bridge.anthropic_api import schemas
from tokentape_bridge.fields import Model

BLOCKS = (schemas.TextBlock, schemas.ThinkingBlock, schemas.ToolUseBlock, schemas.ToolResultBlock)
PARTS: dict[str, tuple[type[Model], ...]] = {
    "metadata.": (schemas.Metadata,),
    "thinking.": (schemas.Thinking,),
    "output_config.": (schemas.OutputConfig,),
    "tools[].": (schemas.Tool,),
    "messages[].": (schemas.UserMessage, schemas.AssistantMessage, schemas.SystemMessage),
    "messages[].content[].": BLOCKS,
}
MODELS: dict[str, dict[str, tuple[type[Model], ...]]] = {
    "Messages": {"": (schemas.MessageRequest,), "tool_choice.": (schemas.ToolChoice,), **PARTS},
    "Count tokens": {"": (schemas.CountTokensRequest,), **PARTS},
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_the_fields_of_the_models(checkout: Path, route: str) -> None:
    names = {path + name for path, models in MODELS[route].items() for model in models for name in model.model_fields}
    table = read_table(checkout, SECTION, ROUTES)[route]
    assert {field for field, status in table.items() if status} == names
    assert set(table.values()) <= {"", "supported", "passed", "ignored", "refused"}


def test_each_field_has_an_example(checkout: Path) -> None:
    assert read_table(checkout, SECTION, ROUTES)["Messages"].keys() == EXAMPLES.keys()
