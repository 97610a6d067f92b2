"""The README's examples, pasted: on real vLLM and, where they say so, real NeMo Gym."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.readme import Reader, blocks, free_port, without_missing_tools
from support.real_engine import load_engine, shut_down

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture
def readme(checkout: Path) -> Path:
    return checkout / "README.md"


@pytest.fixture
def reader(checkout: Path, model_directory: Path, tmp_path: Path) -> Reader:
    assert model_directory.is_relative_to(checkout)
    return Reader(checkout, tmp_path, {50051: free_port(), 8000: free_port()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_directory: Path) -> AsyncGenerator[AsyncLLM]:
    engine = load_engine(model_directory, max_model_len=2048)
    yield engine
    await shut_down(engine)


@pytest.fixture
def tokenizer(model_directory: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    auto_tokenizer: Any = AutoTokenizer
    return auto_tokenizer.from_pretrained(str(model_directory))


async def test_by_hand_and_any_agent(reader: Reader, readme: Path) -> None:
    by_hand = without_missing_tools(blocks(readme, "Try it by hand", "sh"))
    output = reader.paste(*by_hand, *blocks(readme, "Any agent", "sh"), seconds=380)

    assert '"prompt_token_ids"' in output
    assert "tokentape.v1.GenerationService/Generate" in output
    assert '"tokenIds"' in output
    answers, _, watched = output.partition("passed: ")
    assert [line.rpartition(" ")[2] for line in answers.splitlines() if line.endswith((" new", " kept"))] == [
        "new",
        "kept",
    ]
    assert "continues call 0" in watched
    assert output.count("reward ") == 2


async def test_clients(reader: Reader, readme: Path, checkout: Path) -> None:
    """The bridge's examples, each client in a Python of its own, on the sidecar that the README starts."""
    start, *_ = blocks(readme, "Try it by hand", "sh")
    clients = blocks(checkout / "bridge/README.md", "Clients", "python")
    commands = blocks(checkout / "bridge/README.md", "Clients", "sh")
    pasted = [f"python - <<'EOF'\n{client}EOF" for client in clients]
    output = reader.paste(start, *pasted, *commands, seconds=380)

    assert "result=" in output
    assert '"token_ids"' in output
    assert "-- end_turn" in output or "-- max_tokens" in output


async def test_the_call_in_openrlhf(readme: Path, engine: AsyncLLM, tokenizer: Any, tmp_path: Path) -> None:
    example, _ = blocks(readme, "In OpenRLHF", "python")
    code = "async def example(tokenizer, engine):\n" + textwrap.indent(example, "    ") + "    return result\n"
    names: dict[str, Any] = {}
    exec(compile(code, str(readme), "exec"), names)
    result = await names["example"](tokenizer, engine)

    ((start, end),) = result["action_ranges"]
    assert 0 < start < end == len(result["observation_tokens"])
    assert result["reward"] in {0.0, 1.0}


async def test_an_agent_of_ones_own_in_openrlhf(readme: Path, engine: AsyncLLM, tokenizer: Any, tmp_path: Path) -> None:
    from vllm import SamplingParams  # noqa: PLC0415

    _, example = blocks(readme, "In OpenRLHF", "python")
    file = tmp_path / "agent.py"
    file.write_text(example)
    # As OpenRLHF does it.
    spec = importlib.util.spec_from_file_location("agent_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    executor = module.AgentExecutor()
    try:
        result = await executor.execute(
            prompt="What is 2 + 3?",
            label="5",
            sampling_params=SamplingParams(temperature=0.7, max_tokens=32, logprobs=1),
            max_length=512,
            hf_tokenizer=tokenizer,
            llm_engine=engine,
        )
    finally:
        executor.shutdown()

    ((start, end),) = result["action_ranges"]
    text = tokenizer.decode(result["observation_tokens"][start:end], skip_special_tokens=True)
    assert result["reward"] == float("5" in text)
    assert result["extra_logs"]["failed"] == 0.0


async def test_a_file_of_prompts(reader: Reader, readme: Path) -> None:
    """The first command, on three of the hundred questions; what `datasets` reads is what the README says."""
    start, multi_step, _ = blocks(readme, "A file of prompts", "sh")
    (load,) = blocks(readme, "A file of prompts", "python")
    limited = start.replace("--temperature", "--limit 3 --temperature")
    assert limited != start
    count = f"import datasets\n{load}print(rows.num_rows, rows['status'])"
    output = reader.paste(limited, multi_step, f"python - <<'EOF'\n{count}\nEOF", seconds=380)

    assert "3 Column(['completed', 'completed', 'completed'])" in output
    rows = [json.loads(line) for line in (reader.directory / "out/results.jsonl").read_text().splitlines()]
    assert [row["prompt_index"] for row in rows] == [0, 1, 2]
    assert {row["status"] for row in rows} == {"completed"}
    rows = [json.loads(line) for line in (reader.directory / "out/multi_step.jsonl").read_text().splitlines()]
    assert [row["receipt"]["calls"] for row in rows] == [3, 3, 3, 3]
