"""Use langchain-openai as its manual does. Run by test_clients.py with the clients' interpreter."""

from __future__ import annotations

import asyncio
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

ASK = "What number does the red fox have?"


@tool
def paint(color: Literal["red", "blue"], coats: Literal[1, 2, 3]) -> str:
    """Paints the wall."""
    return f"{coats} coats of {color}"


class Fact(BaseModel):
    """What was asked."""

    model_config = ConfigDict(extra="forbid")

    animal: Literal["fox", "bear"]
    number: Literal[1, 2, 3]


def main() -> None:
    model = ChatOpenAI(model="tiny", max_tokens=400, temperature=0, max_retries=0)
    whole = model.invoke(ASK)
    assert whole.content and whole.usage_metadata["output_tokens"] > 0, whole
    chunks = list(model.stream(ASK, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content, (whole, chunks)
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )
    assert [answer.content for answer in model.batch([ASK] * 3)] == [whole.content] * 3
    assert asyncio.run(model.ainvoke(ASK)).content == whole.content

    # strict: otherwise the schema allows properties of any name, and a model with so few words adds them.
    with_tools = model.bind_tools([paint], tool_choice="paint", strict=True)
    asked = with_tools.invoke(ASK)
    [call] = asked.tool_calls
    assert call["name"] == "paint", asked
    told = ToolMessage(paint.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([paint]).invoke([HumanMessage(ASK), asked, told]).response_metadata["finish_reason"]
    streamed = None
    for chunk in with_tools.stream(ASK):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("paint", call["args"])], streamed
    assert model.bind_tools([paint], tool_choice="any", parallel_tool_calls=False, strict=True).invoke(ASK).tool_calls

    for method in ("function_calling", "json_schema"):
        fact = model.with_structured_output(Fact, method=method, strict=True).invoke(ASK)
        assert isinstance(fact, Fact), (method, fact)

    responses = ChatOpenAI(model="tiny", max_tokens=400, temperature=0, max_retries=0, use_responses_api=True)
    assert responses.invoke(ASK).text == whole.content
    assert "".join(chunk.text for chunk in responses.stream(ASK)) == whole.content
    assert (
        responses.bind_tools([paint], tool_choice="paint", strict=True).invoke(ASK).tool_calls[0]["args"]
        == call["args"]
    )
    assert isinstance(responses.with_structured_output(Fact).invoke(ASK), Fact)

    completion = OpenAI(model="tiny", max_tokens=8, temperature=0, max_retries=0)
    assert completion.invoke(ASK) == "".join(completion.stream(ASK))
    print("served")


main()
