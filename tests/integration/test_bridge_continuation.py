"""Conversations over several calls, through real bridge and sidecar processes: what continues what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from support.agent import Agent, Json, message_of, outcome, user
from support.rig import SIDECARS, OpenAgent, StartRig

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge


both_kinds = pytest.mark.parametrize("kind", SIDECARS)


@both_kinds
@pytest.mark.parametrize("name", ["text", "call"])
@pytest.mark.parametrize("with_ids", [True, False])
async def test_each_turn_continues_the_one_before(open_agent: OpenAgent, kind: str, name: str, with_ids: bool) -> None:
    agent = await open_agent(kind, name, return_token_ids=with_ids)
    bodies = [agent.turn() for _ in range(4)]
    tape = await agent.tape()
    assert tape.causes == ["new_conversation", "", "", ""]
    tape.check_conserved()
    for earlier, body, call in zip([None, *bodies], bodies, tape.calls, strict=False):
        assert body["tokentape"]["parent_call_id"] == (earlier["tokentape"]["call_id"] if earlier else None)
        assert body["tokentape"]["call_id"] == call.call_id
        assert body["usage"]["prompt_tokens"] == call.prompt_token_count
        if with_ids:
            assert body["prompt_token_ids"] == tape.prompts[call.call_id]
            assert message_of(body)["generation_token_ids"] == tape.sampled(call.call_id)
    # Only the new ids travel: as many for each turn, however long the conversation is.
    assert len({len(call.prompt_token_ids) for call in tape.calls[1:]}) == 1
    reason = "tool_calls" if name == "call" else "stop"
    assert [body["choices"][0]["finish_reason"] for body in bodies] == [reason] * 4
    ids = [call["id"] for body in bodies for call in message_of(body).get("tool_calls", ())]
    assert len(set(ids)) == len(ids) == (4 if name == "call" else 0)


async def test_any_bridge_continues_any_tape(
    open_agent: OpenAgent, start_rig: StartRig, start_bridge: StartBridge
) -> None:
    agent = await open_agent("smollm2", "call")
    rig = start_rig("smollm2")
    with start_bridge(**rig.addresses).wait_healthy() as other:
        for bridge in (rig.bridge, other, rig.bridge, other):
            agent.client = bridge.client
            agent.turn()
    # A restarted one has nothing but the tape.
    agent.client = start_bridge(listen=other.address, **rig.addresses).wait_healthy().client
    agent.turn()
    tape = await agent.tape()
    assert tape.causes == ["new_conversation", "", "", "", ""]
    tape.check_conserved()


@pytest.fixture(scope="module")
def naive_bridge(start_rig: StartRig, start_bridge: StartBridge) -> Bridge:
    return start_bridge("--no-continuation", **start_rig("smollm2").addresses).wait_healthy()


async def test_without_continuation_every_call_begins_anew(open_agent: OpenAgent, naive_bridge: Bridge) -> None:
    agent = await open_agent("smollm2", "text")
    agent.client = naive_bridge.client
    assert [outcome(agent.turn()) for _ in range(3)] == ["continuation_off"] * 3
    tape = await agent.tape()
    assert tape.causes == ["continuation_off"] * 3
    # What the naive way costs: the answer is not in the next prompt as it was sampled.
    first, second = (call.call_id for call in tape.calls[:2])
    assert tape.prompts[second][: len(tape.prompts[first])] == tape.prompts[first]
    whole = tape.prompts[first] + tape.sampled(first)
    assert tape.prompts[second][: len(whole)] != whole


async def same_answer_twice(agent: Agent, naive_bridge: Bridge) -> tuple[Json, Json]:
    """Have a turn answered twice in the same words, to prompts of other ids; return both answers."""
    agent.turn()
    continued = agent.ask()
    client, agent.client = agent.client, naive_bridge.client
    anew = agent.ask()
    agent.client = client
    assert message_of(continued)["content"] == message_of(anew)["content"]
    assert continued["prompt_token_ids"] != anew["prompt_token_ids"]
    return continued, anew


def without_ids(message: Json) -> Json:
    return {key: value for key, value in message.items() if not key.startswith(("prompt_", "generation_"))}


async def test_echoed_ids_say_which_of_equal_answers_is_meant(open_agent: OpenAgent, naive_bridge: Bridge) -> None:
    agent = await open_agent("smollm2", "text")
    history: list[Json] = []
    wanted = ""
    for meant in await same_answer_twice(agent, naive_bridge):
        wanted = meant["tokentape"]["call_id"]
        on_message = agent.ask([*agent.messages, message_of(meant), user("So?")])
        assert on_message["tokentape"]["parent_call_id"] == wanted
        prefix = meant["prompt_token_ids"] + message_of(meant)["generation_token_ids"]
        history = [without_ids(message) for message in [*agent.messages, message_of(meant), user("So?")]]
        required = agent.ask(history, required_prefix_token_ids=prefix)
        assert required["tokentape"]["parent_call_id"] == wanted
        assert required["prompt_token_ids"][: len(prefix)] == prefix
    # Without ids it is the latest.
    assert agent.ask(history)["tokentape"]["parent_call_id"] == wanted


@pytest.mark.parametrize("ids", [[], [-1], [2**40], [5, 6]])
async def test_ids_that_fit_no_call_are_no_obstacle(open_agent: OpenAgent, ids: list[int]) -> None:
    agent = await open_agent("smollm2", "text")
    agent.turn()
    agent.messages[1] = without_ids(agent.messages[1])
    assert outcome(agent.ask(required_prefix_token_ids=ids)) is None
    agent.messages[1] |= {"prompt_token_ids": ids, "generation_token_ids": ids}
    assert outcome(agent.ask()) is None


async def test_a_child_of_a_choice(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "two", n=2)
    body = agent.ask()
    assert [message_of(body, choice)["content"] for choice in (0, 1)] == ["One.", "Two."]
    for choice in (0, 1):
        assert outcome(agent.ask([*agent.messages, message_of(body, choice), user("Go on.")])) is None
    tape = await agent.tape()
    assert [call.parent.choice for call in tape.calls[1:]] == [0, 1]
    tape.check_conserved()


async def test_a_call_that_was_aborted_or_still_runs_is_no_parent(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "slow")
    with pytest.raises(httpx.ReadTimeout):
        agent.client.post(
            "/v1/chat/completions",
            json={"messages": agent.messages, "metadata": {"tape_id": agent.tape_id}},
            timeout=0.7,
        )
    tape = await agent.tape()
    assert tape.sampled(tape.calls[0].call_id)
    agent.messages += [{"role": "assistant", "content": "Well"}, user("Go on.")]
    # This one is cut before it comes to the slow token.
    assert outcome(agent.ask(max_tokens=1)) == "parent_incomplete"
    running = await agent.start([user("Again.")])
    history = [user("Again."), {"role": "assistant", "content": "Well"}, user("Go on.")]
    assert outcome(agent.ask(history, max_tokens=1)) == "parent_incomplete"
    assert not running.done()
    running.cancel()
    assert (await agent.tape()).causes[1:] == ["parent_incomplete", "new_conversation", "parent_incomplete"]


async def test_a_sealed_tape_takes_no_more(open_agent: OpenAgent) -> None:
    agent = await open_agent("smollm2", "text")
    agent.turn()
    await agent.seal()
    refused = agent.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tape_sealed")
