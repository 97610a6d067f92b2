"""The ways in which rollouts lose their tokens (FIDELITY's numbers), each tried on the bridge's continuation.

Ids are SmolLM2's or Qwen3's. `tests/README.md` says which numbers other tests have.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.agent import TOOLS, user
from support.talk import Json, Said, Talk
from support.tokenizers import KINDS, LoadChatModel
from tokentape_bridge.chat_model import ChatModel
from tokentape_sidecar.engine import FinishReason

IM_END = 2
QUESTION = user("What is in a?")
CALL = '<tool_call>\n{"name": "ls", "arguments": {"p": "a"}}\n</tool_call>'


@pytest.fixture
def smollm2(chat_model: LoadChatModel) -> ChatModel:
    return chat_model("smollm2")


@pytest.fixture
def qwen3(chat_model: LoadChatModel) -> ChatModel:
    return chat_model("qwen3")


def ids(chat: ChatModel, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


def ended(chat: ChatModel, text: str) -> list[int]:
    terminator = min(chat.stop_token_ids & set(ids(chat, "<|im_end|>")))
    return [*ids(chat, text), terminator]


def after(said: Said, *replies: Json) -> list[Json]:
    """The conversation with the answer, as a client echoes it, and what comes then."""
    return [*said.messages, said.echo, *replies]


def result(content: str, number: int = 0) -> Json:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


async def both_turns(chat: ChatModel, completion: list[int], *replies: Json, **first: Any) -> tuple[Said, Said]:
    """Sample `completion`, then go on with `replies`."""
    talk = Talk(chat)
    tools = first.pop("tools", None)
    one = await talk.ask([QUESTION], completion, tools=tools, **first)
    arguments = {key: value for key, value in first.items() if key == "template_arguments"}
    two = await talk.ask(after(one, *(replies or [user("Go on.")])), [IM_END], tools=tools, **arguments)
    return one, two


def check_kept(one: Said, two: Said) -> list[int]:
    """The second call's prompt begins with the first one's and the very ids that it sampled; return what follows."""
    assert two.cause == ""
    assert two.engine_prompt[: len(one.whole)] == one.whole
    return two.engine_prompt[len(one.whole) :]


async def test_bpe_merge_on_reencoding_F01_E01(smollm2: ChatModel) -> None:
    sampled = [843, 15439, IM_END]
    assert ids(smollm2, smollm2.decode(sampled, skip_special_tokens=True)) == [3113]
    check_kept(*await both_turns(smollm2, sampled))


async def test_merge_across_the_turn_boundary_F02(qwen3: ChatModel) -> None:
    # A cut answer, and a client that goes on where it ended: in one text the two would share tokens.
    sampled = ids(qwen3, "inter")
    assert ids(qwen3, "international")[:1] != sampled
    one, two = await both_turns(qwen3, sampled, user("national"), reason=FinishReason.LENGTH)
    assert check_kept(one, two)[0] == KINDS["qwen3"].stop_token_ids[0]


@pytest.mark.parametrize("gap", ["", " ", "\r\n", "\n\t"])
async def test_tool_call_json_is_not_written_anew_F03(qwen3: ChatModel, gap: str) -> None:
    text = f'<tool_call>\n{{"name":{gap}"ls"{gap}, "arguments":{{"p":{gap}"a"{gap}}}}}\n</tool_call>'
    one, two = await both_turns(qwen3, ended(qwen3, text), result("x"), tools=TOOLS)
    assert [(call.name, call.arguments) for call in one.answer.tool_calls] == [("ls", {"p": "a"})]
    check_kept(one, two)


@pytest.mark.parametrize("kind", ["smollm2", "qwen3"])
async def test_calls_that_no_parser_reads_break_no_prefix_F04(chat_model: LoadChatModel, kind: str) -> None:
    chat = chat_model(kind)
    text = '<tool_call>\n{"name": "sh",\n "arguments": {"c": "a\nb"}\n}\n</tool_call>'
    one, two = await both_turns(chat, ended(chat, text), tools=TOOLS)
    assert one.answer.content == text, "a line break within a JSON string is no JSON"
    check_kept(one, two)


async def test_stripped_reasoning_begins_a_sample_or_is_kept_by_policy_F05_E03(qwen3: ChatModel) -> None:
    sampled = ended(qwen3, "<think>\nhm\n</think>\n\nYes.")
    one, two = await both_turns(qwen3, sampled)
    assert two.cause == "template_strips_reasoning"
    assert two.engine_prompt == qwen3.render(two.conversation)
    assert "hm" not in qwen3.decode(two.engine_prompt, skip_special_tokens=False)
    talk = Talk(qwen3, keep_reasoning=True)
    one = await talk.ask([QUESTION], sampled)
    check_kept(one, await talk.ask(after(one, user("Go on.")), sampled))


async def test_reasoning_of_a_whole_tool_cycle_is_kept_by_policy_F05(qwen3: ChatModel) -> None:
    for keep, cause in ((False, "template_strips_reasoning"), (True, "")):
        talk = Talk(qwen3, keep_reasoning=keep)
        one = await talk.ask([QUESTION], ended(qwen3, f"<think>\nhm\n</think>\n\n{CALL}"), tools=TOOLS)
        two = await talk.ask(after(one, result("x")), ended(qwen3, "<think>\nso\n</think>\n\nx."), tools=TOOLS)
        check_kept(one, two)
        three = await talk.ask(after(two, user("Go on.")), ended(qwen3, "Yes."), tools=TOOLS)
        assert three.cause == cause
        if keep:
            check_kept(two, three)


async def test_an_empty_think_block_stays_where_it_was_sampled_F06(qwen3: ChatModel) -> None:
    check_kept(*await both_turns(qwen3, ended(qwen3, "<think>\n\n</think>\n\nYes.")))


async def test_an_empty_think_block_of_the_template_F06(qwen3: ChatModel) -> None:
    # Written with the generation prompt, left out of the history: another prompt, so a sample of its own.
    off: Json = {"template_arguments": {"enable_thinking": False}}
    one, two = await both_turns(qwen3, ended(qwen3, "Yes."), **off)
    assert two.cause == "template_rewrites_history"
    talk = Talk(qwen3, keep_reasoning=True)
    one = await talk.ask([QUESTION], ended(qwen3, "Yes."), **off)
    assert qwen3.decode(one.engine_prompt, skip_special_tokens=False).endswith("</think>\n\n")
    check_kept(one, await talk.ask(after(one, user("Go on.")), ended(qwen3, "No."), **off))


async def test_reasoning_that_the_prompt_opens_F07(chat_model: LoadChatModel) -> None:
    chat = chat_model("gptoss")
    sampled = ids(chat, "hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>")
    talk = Talk(chat, keep_reasoning=True)
    one = await talk.ask([QUESTION], sampled)
    assert (one.answer.reasoning, one.answer.content) == ("hm", "Yes.")
    check_kept(one, await talk.ask(after(one, user("Go on.")), sampled))


async def test_special_token_text_in_an_answer_F08(smollm2: ChatModel) -> None:
    # Spelled by the model in ordinary tokens: a template cannot tell it from the token.
    spelled = [*ids(smollm2, "say <"), *ids(smollm2, "|im_end|>")]
    assert IM_END not in spelled
    one, two = await both_turns(smollm2, [*spelled, IM_END])
    assert one.answer.content == "say <|im_end|>"
    assert two.cause == "special_token_text"
    assert two.engine_prompt.count(IM_END) == 4, "system, question, answer, reply; none from content"


@pytest.mark.parametrize("place", ["content", "arguments", "tools"])
async def test_special_token_text_anywhere_in_a_prompt_F08(qwen3: ChatModel, place: str) -> None:
    text = "a <|im_end|> b<|im_start|>"
    asked = user(text if place == "content" else "a")
    arguments = f'{{"p": "{text}"}}' if place == "arguments" else "{}"
    call = {"id": "c0", "type": "function", "function": {"name": "ls", "arguments": arguments}}
    history: list[Json] = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result("x")]
    described: Json = {"name": "ls", "description": text if place == "tools" else "list"}
    said = await Talk(qwen3).ask(history, [], tools=[{"type": "function", "function": described}])
    assert text in qwen3.decode(said.engine_prompt, skip_special_tokens=False)
    start, end = ids(qwen3, "<|im_start|><|im_end|>")
    assert (said.engine_prompt.count(start), said.engine_prompt.count(end)) == (5, 4)


async def test_special_tokens_inside_an_answer_stay_F09(qwen3: ChatModel) -> None:
    [inner] = ids(qwen3, "<|object_ref_start|>")
    sampled = [*ids(qwen3, "a"), inner, *ended(qwen3, "b")]
    one, two = await both_turns(qwen3, sampled)
    assert one.answer.content == "ab"
    assert inner in check_kept(one, two) + one.completion


@pytest.mark.parametrize("sampled", [[2231, 216], [2231], [2231, 3717], [2231, 198], [216, 198]])
async def test_space_at_an_answers_end_stays_F10(smollm2: ChatModel, sampled: list[int]) -> None:
    check_kept(*await both_turns(smollm2, [*sampled, IM_END]))


async def test_half_a_character_stays_F11(smollm2: ChatModel) -> None:
    assert smollm2.decode([10813], skip_special_tokens=False) == "\N{REPLACEMENT CHARACTER}"
    for sampled, reason in (([10813], FinishReason.LENGTH), ([10813, IM_END], FinishReason.STOP)):
        check_kept(*await both_turns(smollm2, sampled, reason=reason))


async def test_a_stop_string_is_cut_from_the_text_only_F12(smollm2: ChatModel) -> None:
    # With a token too many, as an engine leaves that samples several at once.
    sampled = ids(smollm2, "one END two")
    one, two = await both_turns(smollm2, sampled, stop_string=" END")
    assert one.answer.content == "one"
    delta = check_kept(one, two)
    assert delta[0] == IM_END, "the turn's end was not sampled: it is the template's"


async def test_a_terminator_is_neither_lost_nor_made_up_F13(smollm2: ChatModel) -> None:
    answer = ids(smollm2, "Yes.")
    one, two = await both_turns(smollm2, [*answer, IM_END])
    assert check_kept(one, two)[0] != IM_END
    one, two = await both_turns(smollm2, answer, reason=FinishReason.LENGTH)
    assert check_kept(one, two)[0] == IM_END
    # An end within the answer, as with ignore_eos: the template has none there.
    one, two = await both_turns(smollm2, [*answer, IM_END, *answer, IM_END])
    assert two.cause == "terminator_differs"
    # Another end than the template's.
    one, two = await both_turns(smollm2, [*answer, 0], stop_token_id=0)
    assert two.cause == "terminator_differs"


async def test_the_templates_newline_is_not_the_models_F14(smollm2: ChatModel) -> None:
    one, two = await both_turns(smollm2, [*ids(smollm2, "Yes."), IM_END])
    newline = ids(smollm2, "\n")
    assert check_kept(one, two)[:1] == newline
    assert one.completion[-1] == IM_END


async def test_a_stop_on_a_role_marker_is_not_written_twice_F15(smollm2: ChatModel) -> None:
    # <|im_start|> as a stop token: the next turn begins with it again.
    [marker] = ids(smollm2, "<|im_start|>")
    _, two = await both_turns(smollm2, [*ids(smollm2, "Yes."), marker], stop_token_id=marker)
    assert two.cause == "terminator_differs"
    assert [marker, marker] not in [two.engine_prompt[i : i + 2] for i in range(len(two.engine_prompt))]


@pytest.mark.parametrize("kind", ["llama3_1", "gemma3", "deepseek_v3"])
async def test_one_beginning_of_sequence_F16(chat_model: LoadChatModel, kind: str) -> None:
    chat = chat_model(kind)
    bos = {"llama3_1": 128000, "gemma3": 2, "deepseek_v3": 0}[kind]
    one, two = await both_turns(chat, [*ids(chat, "Yes."), KINDS[kind].stop_token_ids[0]])
    check_kept(one, two)
    assert (one.engine_prompt.count(bos), two.engine_prompt.count(bos)) == (1, 1)
    assert two.engine_prompt[0] == bos


async def test_the_default_system_prompt_comes_once_F20(smollm2: ChatModel) -> None:
    one, two = await both_turns(smollm2, ended(smollm2, "Yes."))
    check_kept(one, two)
    assert smollm2.decode(two.engine_prompt, skip_special_tokens=False).count("named SmolLM") == 1


async def test_results_of_parallel_calls_share_a_turn_F21(qwen3: ChatModel) -> None:
    one, two = await both_turns(qwen3, ended(qwen3, f"{CALL}\n{CALL}"), result("x"), result("y", 1), tools=TOOLS)
    delta = check_kept(one, two)
    assert delta == qwen3.render(two.conversation)[-len(delta) :]
    assert qwen3.decode(delta, skip_special_tokens=False).count("<|im_start|>user") == 1


async def test_an_answer_of_the_harness_is_never_sampled_F23(smollm2: ChatModel) -> None:
    talk = Talk(smollm2)
    one = await talk.ask([QUESTION], ended(smollm2, "Yes."))
    own = {"role": "assistant", "content": "No.", "prompt_token_ids": [0], "generation_token_ids": [0]}
    two = await talk.ask(after(one, own, user("Go on.")), ended(smollm2, "Well."), echoed_token_ids=[0, 0])
    assert two.cause == "answer_inserted"
    assert two.engine_prompt == smollm2.render(two.conversation)


async def test_ids_dropped_by_a_schema_are_not_needed_F24(smollm2: ChatModel) -> None:
    talk = Talk(smollm2)
    one = await talk.ask([QUESTION], [843, 15439, IM_END])
    for echoed in ((), one.engine_prompt, one.whole):
        check_kept(one, await talk.ask(after(one, user("Go on.")), [IM_END], echoed_token_ids=echoed))


async def test_the_prompt_is_what_tokenize_says_F25(qwen3: ChatModel) -> None:
    talk = Talk(qwen3)
    one = await talk.ask([QUESTION], ended(qwen3, CALL), tools=TOOLS)
    two = await talk.ask(after(one, result("x")), ended(qwen3, "x"), tools=TOOLS)
    for said in (one, two):
        # /tokenize renders; here the model wrote its call as the template does.
        assert said.engine_prompt == qwen3.render(said.conversation)
