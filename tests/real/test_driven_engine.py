"""An engine that its trainer drives itself, as OpenRLHF does, with a sidecar that sees what is done (CPU, SmolLM2).

Its weights stay as they are: what changes is what the sidecar must know of it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from support.controlled import Controller
from support.real_engine import AdapterPath, RealEngine
from support.refusals import refused
from support.scripted import RunningSidecar, sidecar_on
from tokentape.listen import UnixAddress
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_sidecar.listener import Listener

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(240),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SAMPLING = types_pb2.SamplingParameters(temperature=1.0, max_tokens=64, ignore_eos=True)


@asynccontextmanager
async def controlled(engine: RealEngine, path: AdapterPath) -> AsyncGenerator[tuple[RunningSidecar, Controller]]:
    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    with tempfile.TemporaryDirectory(prefix="tokentape-") as directory:
        socket = UnixAddress(Path(directory) / "control.sock")
        attached = VllmEngine.attach(engine.llm, path=path)
        async with sidecar_on(attached, control=Listener(socket), weights_root=Path(directory)) as running:
            controller = Controller(str(socket))
            yield running, controller
            await controller.channel.close()


async def test_what_a_trainer_does_to_the_engine_is_seen_and_ends_stale_calls(
    engine: RealEngine, path: AdapterPath, model_directory: Path
) -> None:
    llm, prompt = engine.llm, engine.prompt("Write a short poem.")
    async with controlled(engine, path) as (running, controller):
        client = running.client
        bound = await client.open_tape(limits=tape_pb2.TapeLimits(max_weight_changes=0))
        stale = asyncio.create_task(client.generate(prompt, SAMPLING, tape_id=bound.tape_id))
        free = await client.open_tape()
        living = asyncio.create_task(client.generate(prompt, SAMPLING, tape_id=free.tape_id))
        async with asyncio.timeout(60):
            while min([len(await client.entries(tape)) for tape in (bound, free)]) < 2:  # noqa: ASYNC110 - who asks
                await asyncio.sleep(0.05)
        await llm.pause_generation(mode="keep")
        assert await controller.phase() == "PAUSED"
        for _ in range(2):
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_directory)})
        await llm.reset_prefix_cache()
        assert (await controller.state()).weight_version == "1"
        with refused(grpc.StatusCode.ABORTED, r"have changed 1 times .* live through 0 \(max_weight_changes\)"):
            await stale
        await llm.resume_generation()
        assert await controller.phase() == "RUNNING"
        generated = await living
        assert len(generated.token_ids()) == SAMPLING.max_tokens
        assert set(generated.weight_versions()) == {"", "1"}
        await llm.sleep(level=1, mode="keep")
        assert await controller.phase() == "ASLEEP"
        await llm.wake_up()
        assert await controller.phase() == "RUNNING"
    assert llm.output_processor.get_num_unfinished_requests() == 0
