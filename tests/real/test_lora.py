"""LoRA adapters on a real vLLM engine (CPU): what is sampled and recorded is the adapter's, by either way into vLLM.

The truth is a forward pass of transformers over the same tokens, with the adapters' products added to the weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
import pytest
import pytest_asyncio

from support.real_engine import CPU_ENVIRONMENT
from support.refusals import refused
from support.scripted import run_sidecar, sidecar_on
from support.sidecar_client import SidecarClient, read_to_end
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_executor.assembler import Assembler
from tokentape_executor.trajectory import Sample

if TYPE_CHECKING:
    from tokentape_sidecar.vllm_engine import VllmEngine

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

PROMPT = [1, 3, 504, 28, 57, 506, 253]
RANKS = {"math": 4, "code": 12}
ALPHA = 8
TOKENS = 16
SAME, OTHER = 1e-3, 0.1
"""Mean differences of log-probabilities: in float32 equal weights are below the one, others above the other."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, and what it adds to each weight, by the weight's name in transformers."""

    directory: Path
    added: Mapping[str, Any] = field(repr=False)


def write_adapter(directory: Path, config: Mapping[str, Any], rank: int) -> Adapter:
    """Write an adapter of random weights in PEFT's format for the attention of a model with this configuration."""
    import torch  # noqa: PLC0415 - seconds
    from safetensors import torch as safetensors_torch  # noqa: PLC0415

    files: Any = safetensors_torch

    random = torch.Generator().manual_seed(rank)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    shapes = {"q_proj": width, "v_proj": width // heads * config["num_key_value_heads"]}
    tensors: dict[str, Any] = {}
    added: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for module, rows in shapes.items():
            name = f"model.layers.{layer}.self_attn.{module}"
            a = (torch.randn(rank, width, generator=random) * 0.05).bfloat16()
            b = (torch.randn(rows, rank, generator=random) * 0.05).bfloat16()
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            added[f"{name}.weight"] = b.float() @ a.float() * (ALPHA / rank)
    directory.mkdir()
    files.save_file(tensors, str(directory / "adapter_model.safetensors"))
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(shapes), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return Adapter(directory, added)


@pytest.fixture(scope="module")
def adapters(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    config = json.loads((model_directory / "config.json").read_text())
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, config, rank) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def models(model_directory: Path, adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """By the adapter's name, "" for none: transformers' model with its weights merged by hand."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    loader: Any = AutoModelForCausalLM

    def load(added: Mapping[str, Any]) -> Any:
        model = loader.from_pretrained(str(model_directory), dtype=torch.float32)
        with torch.no_grad():
            for name, value in added.items():
                model.get_parameter(name).add_(value)
        return model.eval()

    return {"": load({}), **{name: load(adapter.added) for name, adapter in adapters.items()}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_directory: Path, adapters: Mapping[str, Adapter]) -> AsyncGenerator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - reads the environment

        engine = await VllmEngine.load(
            model=str(model_directory),
            served_model_name="base",
            logprobs_mode="processed",
            loras={name: adapter.directory for name, adapter in adapters.items()},
            arguments=["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"],
        )
        yield engine
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["direct", "public"])
async def client(
    request: pytest.FixtureRequest, engine: VllmEngine, adapters: Mapping[str, Adapter]
) -> AsyncGenerator[SidecarClient]:
    """A client of the engine's own sidecar, and of one that reaches the engine by vLLM's public interface."""
    way: Literal["direct", "public"] = request.param
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415

    # As a trainer has loaded them: with the ids that they have in the engine.
    loras = [LoRARequest(name, i, str(adapter.directory)) for i, (name, adapter) in enumerate(adapters.items(), 1)]
    llm = engine._engine  # pyright: ignore[reportPrivateUsage]
    async with sidecar_on(VllmEngine.attach(llm, loras=loras, path=way)) as running:
        yield running.client


async def sampled(client: SidecarClient, names: list[str]) -> list[Sample]:
    """Sample one call with each adapter, all at once on one tape; return their samples by the tape."""
    tape = await client.open_tape()
    streams = [
        client.generation.Generate(
            generation_pb2.GenerateRequest(
                prompt_token_ids=PROMPT,
                tape_id=tape.tape_id,
                lora_name=name,
                sampling=types_pb2.SamplingParameters(max_tokens=TOKENS, temperature=1.0, ignore_eos=True),
            )
        )
        for name in names
    ]
    for stream in streams:
        await read_to_end(stream)
    await client.seal(tape)
    assembler = Assembler()
    for entry in await client.entries(tape):
        assembler.feed(entry)
    return assembler.trajectory().samples


async def test_each_adapters_tokens_have_its_own_logprobs(client: SidecarClient, models: Mapping[str, Any]) -> None:
    samples = await sampled(client, list(models))
    assert [sample.lora_name for sample in samples] == list(models)
    for name, model in models.items():
        for sample, difference in zip(samples, mean_differences(samples, model), strict=True):
            assert sample.action_ranges == [(len(PROMPT), len(PROMPT) + TOKENS)]
            if name == sample.lora_name:
                assert difference < SAME, (name, difference)
            else:
                assert difference > OTHER, (name, sample.lora_name, difference)


def mean_differences(samples: Sequence[Sample], model: Any) -> list[float]:
    """How far each sample's log-probabilities are from those of `model`, a token, on average."""
    import torch  # noqa: PLC0415

    tokens = torch.tensor([sample.tokens for sample in samples])
    with torch.no_grad():
        expected = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[:, -TOKENS:, 0]
    recorded = torch.tensor([sample.logprobs for sample in samples])[:, -TOKENS:]
    return (recorded - expected).abs().mean(dim=1).tolist()


async def test_the_adapters_are_listed_and_others_not_found(client: SidecarClient) -> None:
    model = await client.generation.GetModel(generation_pb2.GetModelRequest())
    assert list(model.lora_names) == ["math", "code"]
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], lora_name="maths")
    with refused(grpc.StatusCode.NOT_FOUND, "lora_name: no LoRA adapter 'maths' is loaded; there are: math, code"):
        await client.generation.Generate(request).read()


async def test_the_engine_has_room_for_the_largest_rank(engine: VllmEngine) -> None:
    config = engine._engine.vllm_config.lora_config  # pyright: ignore[reportPrivateUsage]
    assert config is not None
    # One slot stays empty: see `loras.py`.
    assert (config.max_loras, config.max_lora_rank) == (3, 16)


def test_too_few_slots_end_the_start(model_directory: Path, adapters: Mapping[str, Adapter]) -> None:
    ended = run_sidecar(
        *("--model", str(model_directory), "--lora", f"math={adapters['math'].directory}", "--", "--max-loras", "1"),
        seconds=120,
    )
    assert ended.returncode == 1
    assert "--max-loras: 1 adapters need 2 on a CPU, not 1" in ended.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"--lora: math: cannot read \S+/adapter_config.json: No such file or directory"),
        ('{"r": 4}', r"--lora: math: \S+/adapter_config.json is not PEFT's: Missing required configuration fields"),
        ('{"r": 1000, "lora_alpha": 1, "target_modules": []}', "--lora: an adapter has rank 1000; vLLM serves at most"),
    ],
    ids=["missing", "not an adapter", "too large"],
)
def test_a_bad_directory_ends_the_start_before_the_model_loads(
    model_directory: Path, tmp_path: Path, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    ended = run_sidecar("--model", str(model_directory), "--lora", f"math={tmp_path}", seconds=120)
    assert ended.returncode == 1
    assert re.search(f"^tokentape-sidecar: {told}", ended.stderr, re.MULTILINE), ended.stderr
