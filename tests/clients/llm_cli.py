"""The ``llm`` command: a model of its configuration file, streamed, whole, and with a schema."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    known = {"model_id": "mine", "model_name": model, "api_base": f"{url}/v1", "supports_schema": True}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([known]))

    def llm(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", "prompt", "-m", "mine", "--key", "none", "-o", "temperature", "0"]
        environment = {**os.environ, "LLM_USER_PATH": folder, "HOME": folder}
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    question = "What is the capital of France?"
    answer = llm(question, "-o", "max_tokens", "20")
    assert "Paris" in answer, answer
    assert llm(question, "-o", "max_tokens", "20", "--no-stream") == answer
    schema = {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    sized = llm(
        "Is Paris large?", "-o", "max_tokens", "60", "--schema", json.dumps(schema | {"additionalProperties": False})
    )
    assert set(json.loads(sized)) == {"large"}, sized
