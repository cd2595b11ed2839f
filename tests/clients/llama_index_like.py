"""llama-index's openai-like: complete, chat, stream."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
llm = OpenAILike(
    model=model, api_base=f"{url}/v1", api_key="none", context_window=2048, is_chat_model=True,
    temperature=0, max_tokens=20,
)  # fmt: skip
question = "What is the capital of France?"
answer = llm.complete(question)
assert "Paris" in str(answer), answer
assert "".join(chunk.delta or "" for chunk in llm.stream_complete(question)) == str(answer)
chat = llm.chat([ChatMessage(role="user", content=question)])
assert chat.message.content == str(answer)
plain = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=False, temperature=0, max_tokens=8)
assert str(plain.complete("The capital of France is"))
