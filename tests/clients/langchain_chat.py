"""langchain-openai's first page: invoke, stream, structured output, tools."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
llm = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_completion_tokens=60)
messages = [("system", "You are a helpful assistant."), ("human", "What is the capital of France?")]
answer = llm.invoke(messages)
assert "Paris" in answer.content, answer
assert answer.usage_metadata and answer.usage_metadata["output_tokens"] <= 60
assert "".join(chunk.content for chunk in llm.stream(messages)) == answer.content


class Verdict(BaseModel):
    """A verdict on a joke."""

    verdict: Literal["funny", "dull"]
    stars: Literal[1, 2, 3]


for method in ("json_schema", "function_calling"):
    verdict = llm.with_structured_output(Verdict, method=method).invoke("Rate this joke: a horse walks into a bar.")
    assert isinstance(verdict, Verdict), verdict


@tool
def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Add two numbers."""
    return a + b


bound = llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).bind(max_tokens=60)
(call,) = bound.invoke("What is 1 + 3?").tool_calls
assert call["name"] == "add" and add.invoke(call["args"]) in (4, 5, 6), call
