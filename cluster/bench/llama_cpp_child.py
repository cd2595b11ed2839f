"""Runs where only ``xllamacpp`` is installed: one JSON object per line in and out.

argv[1]: {"model", "parallel", "context", "threads"}; then per line {"prompts": [[id]], "count": tokens}, answered by
{"timings": [llama.cpp's own, per prompt]}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any


def serve(given: dict[str, Any], out: Any) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = given["model"]
    params.n_parallel = given["parallel"]
    params.n_ctx = given["parallel"] * given["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
    server = xllamacpp.Server(params)
    say(out, {"version": xllamacpp.__version__, "system": xllamacpp.get_system_info()})
    for line in sys.stdin:
        asked = json.loads(line)
        timings: list[Any] = [None] * len(asked["prompts"])

        def complete(index: int, asked: Any = asked, timings: list[Any] = timings) -> None:
            body = {"prompt": asked["prompts"][index], "max_tokens": asked["count"], "temperature": 0}
            answer = server.handle_completions(body | {"ignore_eos": True, "cache_prompt": True})
            timings[index] = answer.get("timings") or answer

        threads = [threading.Thread(target=complete, args=(i,)) for i in range(len(timings))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(out, {"timings": timings})


def say(out: Any, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    # Whatever the library prints must not end up between our lines.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        serve(json.loads(sys.argv[1]), channel)
    except Exception as error:
        say(channel, {"error": repr(error)})
