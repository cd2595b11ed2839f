"""The structures of ``native.h`` and ``native.c``, field by field. They hold addresses: whoever makes one keeps what it
points to."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_LONG, _FLOAT, _INT, _AT = ctypes.c_long, ctypes.c_float, ctypes.c_int, ctypes.c_void_p


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    _fields_ = _fields(_AT, "codes scale least") + _fields(_LONG, "wide out") + _fields(_INT, "bits")


class Product(ctypes.Structure):
    _fields_ = (
        _fields(_AT, "w x norm bias residual y scratch")
        + _fields(_LONG, "rows")
        + _fields(_FLOAT, "eps")
        + _fields(_INT, "gated quantizes")
    )


class Shape(ctypes.Structure):
    _fields_ = _fields(_LONG, "heads kv_heads dim page_size token_stride") + _fields(_FLOAT, "eps scale")


class Plan(ctypes.Structure):
    _fields_ = _fields(_LONG, "tokens requests table_width") + _fields(
        _AT, "begin kv_len table positions slots splits cosine sine keys partials"
    )


class Layer(ctypes.Structure):
    _fields_ = (
        _fields(_AT, "input_norm post_norm q_norm k_norm qkv_bias")
        + _fields(Matrix, "qkv o gate_up down")
        + _fields(_AT, "k v")
    )


class Rows(ctypes.Structure):
    _fields_ = (
        _fields(_AT, "h qkv mixed gated scratch rows")
        + _fields(_LONG, "num_rows")
        + _fields(_AT, "out")
        + _fields(_INT, "quantizes")
    )


def at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
