"""The demo's model as built: an instruct model that answers, ends its turn, and brings its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)  # the first run builds it


def test_knows_how_to_end_and_how_to_chat(model_directory: Path) -> None:
    assert json.loads((model_directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((model_directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert "<|im_start|>" in (model_directory / "chat_template.jinja").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what transformers imports
def test_answers_a_question(model_directory: Path) -> None:
    import transformers  # noqa: PLC0415 (it takes seconds)

    hub: Any = transformers
    tokenizer = hub.AutoTokenizer.from_pretrained(model_directory)
    model = hub.AutoModelForCausalLM.from_pretrained(model_directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    completion = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]

    assert tokenizer.decode(completion) == "2 + 3 = 5<|im_end|>"
