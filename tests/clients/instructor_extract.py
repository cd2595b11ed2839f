"""instructor's first page: a pydantic object out of a sentence, by tools and by JSON schema."""

import sys

import instructor
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]


class User(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_provider(f"openai/{model}", base_url=f"{url}/v1", api_key="none", mode=mode)
    user = client.chat.completions.create(
        response_model=User,
        messages=[{"role": "user", "content": "John Doe is 30 years old."}],
        temperature=0,
        max_tokens=100,
        max_retries=0,
    )
    assert isinstance(user, User), user
