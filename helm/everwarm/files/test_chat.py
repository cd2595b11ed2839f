"""What `helm test` runs: wait for /ready, ask for one chat completion, print the answer. Standard library only."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE = os.environ["BASE_URL"]
LINES = map(str.strip, os.environ.get("EVERWARM_API_KEYS", "").splitlines())
KEYS = [line for line in LINES if line and not line.startswith("#")]


def call(path, body=None):
    request = urllib.request.Request(BASE + path, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    if KEYS:
        request.add_header("Authorization", "Bearer " + KEYS[0])
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read()


deadline = time.monotonic() + float(os.environ["TIMEOUT_S"])
while True:
    try:
        call("/ready")
        break
    except (urllib.error.URLError, OSError) as error:
        if time.monotonic() > deadline:
            sys.exit(f"{BASE}/ready: {error}")
        time.sleep(2)

model = json.loads(call("/v1/models"))["data"][0]["id"]
question = [{"role": "user", "content": "What is the capital of France?"}]
reply = json.loads(
    call("/v1/chat/completions", {"model": model, "messages": question, "max_tokens": 16, "temperature": 0})
)
text = reply["choices"][0]["message"]["content"]
if not text or reply["usage"]["completion_tokens"] < 1:
    sys.exit(f"no text in {reply}")
print(f"{model}: {text}")
