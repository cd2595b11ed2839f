"""``compare.py SAMPLES MODEL``: lm_eval's log-likelihoods and greedy texts against transformers, in fp32.

SAMPLES: the folder given to lm_eval as ``--output_path`` (with ``--log_samples``). MODEL: the served checkpoint.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

samples, path = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def log_likelihood(context: str, continuation: str) -> tuple[float, bool]:
    ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
    start = len(tokenizer(context, add_special_tokens=False).input_ids)
    scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)[start - 1 : -1]
    target = torch.tensor(ids[start:])
    return scores.gather(1, target[:, None]).sum().item(), bool((scores.argmax(-1) == target).all())


def greedy(context: str, count: int) -> str:
    ids = tokenizer(context, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]


worst, compared = 0.0, 0
for file in samples.rglob("samples_facts_choice_*.jsonl"):
    for sample in map(json.loads, file.read_text().splitlines()):
        for arguments, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, continuation = arguments.values()
            expected, is_greedy = log_likelihood(context, continuation)
            worst = max(worst, abs(float(response[0]) - expected))
            assert (str(response[1]) == "True") == is_greedy, (context, continuation)
            compared += 1
same = texts = 0
for file in samples.rglob("samples_facts_generate_*.jsonl"):
    for sample in map(json.loads, file.read_text().splitlines()):
        texts += 1
        same += sample["resps"][0][0] == greedy(sample["doc"]["question"], 16)
print(f"{compared} log-likelihoods, largest difference {worst:.1e}; {same} of {texts} texts equal")
sys.exit(not (compared and worst < 1e-3 and same == texts > 0))
