"""Run agents of LangChain and pydantic-ai in a loop of three tool calls. Run by test_clients.py with the clients'
interpreter.

The model has only a few words, so each step but the last must call a tool, and the last one may not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent, ModelSettings, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

ASK = "What number does the red fox have?"
NUM_CALLS = 3
Told = list[tuple[str, int]]


def painter(told: Told) -> Callable[..., str]:
    def paint(color: Literal["red", "blue"], coats: Literal[1, 2, 3]) -> str:
        """Paints the wall."""
        told.append((color, coats))
        return f"{coats} coats of {color}"

    return paint


@wrap_model_call
def three_calls(request: Any, handler: Callable[[Any], Any]) -> Any:
    done = sum(isinstance(message, ToolMessage) for message in request.messages)
    settings = {"parallel_tool_calls": False, "strict": True}
    return handler(request.override(tool_choice="any" if done < NUM_CALLS else "none", model_settings=settings))


def use_langchain(uses_responses: bool) -> None:
    model = ChatOpenAI(model="tiny", max_tokens=120, temperature=0, max_retries=0, use_responses_api=uses_responses)
    answers = []
    for streams in (False, True):
        told: Told = []
        agent = create_agent(model, [painter(told)], system_prompt="Paint.", middleware=[three_calls])
        question: Any = {"messages": [{"role": "user", "content": ASK}]}
        if streams:
            *_, state = agent.stream(question, stream_mode="values")
        else:
            state = agent.invoke(question)
        called = [
            call for message in state["messages"] if isinstance(message, AIMessage) for call in message.tool_calls
        ]
        assert len(told) == NUM_CALLS and [(c["args"]["color"], c["args"]["coats"]) for c in called] == told, state
        returned = [message.tool_call_id for message in state["messages"] if isinstance(message, ToolMessage)]
        assert returned == [call["id"] for call in called], state
        assert state["messages"][-1].text, state
        answers.append((told, state["messages"][-1].text))
    assert answers[0] == answers[1], answers


class ThreeCalls(AbstractCapability[Any]):
    def get_model_settings(self) -> Callable[[RunContext[Any]], ModelSettings]:
        def settings(context: RunContext[Any]) -> ModelSettings:
            return ModelSettings(tool_choice="required" if context.run_step <= NUM_CALLS else "none")

        return settings


async def use_pydantic_ai(model: Model) -> None:
    answers = []
    for streams in (False, True):
        told: Told = []
        agent = Agent(
            model,
            instructions="Paint.",
            capabilities=[ThreeCalls()],
            model_settings=ModelSettings(max_tokens=120, temperature=0, parallel_tool_calls=False),
        )
        agent.tool_plain(strict=True)(painter(told))
        if streams:
            async with agent.run_stream(ASK) as run:
                text = "".join([part async for part in run.stream_text(delta=True)])
                messages, usage = run.all_messages(), run.usage
        else:
            result = await agent.run(ASK)
            text, messages, usage = result.output, result.all_messages(), result.usage
        parts = [part for message in messages for part in message.parts]
        called = [part for part in parts if isinstance(part, ToolCallPart)]
        assert len(told) == NUM_CALLS, messages
        assert [(c.args_as_dict()["color"], c.args_as_dict()["coats"]) for c in called] == told, messages
        returned = [part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)]
        assert returned == [call.tool_call_id for call in called] and text, messages
        assert usage.requests == NUM_CALLS + 1 and usage.output_tokens > 0, usage
        answers.append((told, text))
    assert answers[0] == answers[1], answers


def main() -> None:
    for uses_responses in (False, True):
        use_langchain(uses_responses)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asyncio.run(use_pydantic_ai(kind("tiny")))
    print("served")


main()
