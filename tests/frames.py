"""Frames of the token plane, out of bytes."""

from __future__ import annotations

from typing import Any

from router.framing import FrameBuffer


def frames_in(data: bytes, buffer: FrameBuffer | None = None) -> list[list[Any]]:
    """All complete frames after ``data`` has joined what ``buffer`` holds."""
    buffer = FrameBuffer() if buffer is None else buffer
    buffer.append(data)
    return list(iter(buffer.take, None))
