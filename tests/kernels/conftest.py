"""The tests under ``device/`` run the Triton kernels: compiled where a GPU is, interpreted where TRITON_INTERPRET=1 was
set before Triton's first import. Elsewhere they cannot run; ``test_interpreter.py`` starts a process where they can.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["device"]
