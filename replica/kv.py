"""The KV memory of one device: every layer's pages in one allocation, so that a page moves as a whole.

CPU    codes [layers, pages, page_size, 2 kv_heads, dim]    k and v are the halves of one gather
GPU    codes [2 layers, pages, page_size, kv_heads, dim]    k and v contiguous each, as the kernels want them
       scales: the same without dim, fp32, for int8 and int4
"""

from __future__ import annotations

import threading
import time

import torch

from kernels.interface import LayerKV
from kernels.quantized_kv import SCALED, raw, stored_dim, stored_dtype
from replica.model import ModelConfig

_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd 64-bit constant, as int64."""


class PagedKV:
    """Zeroed pages for every layer. Zeroed, because attention multiplies what it masks by 0, and 0 * NaN is NaN.

    ``kv_dtype``: a resolved ``kv_cache_dtype``. Raises ValueError for one that the model's heads can't be stored in.
    """

    def __init__(
        self, model: ModelConfig, num_pages: int, page_size: int, kv_dtype: str, device: torch.device | str
    ) -> None:
        device = torch.device(device)
        heads, self.num_pages = model.num_kv_heads, num_pages
        dim, dtype = stored_dim(kv_dtype, model.head_dim), stored_dtype(kv_dtype)
        joined = device.type == "cpu"
        shape = (
            (model.num_layers, num_pages, page_size, 2 * heads)
            if joined
            else (2 * model.num_layers, num_pages, page_size, heads)
        )
        self._codes = torch.zeros(*shape, dim, dtype=dtype, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device) if kv_dtype in SCALED else None
        self.layers = [self._layer(i, heads, joined) for i in range(model.num_layers)]
        self._parts = [raw(self._codes)] + ([] if self._scales is None else [self._scales])

    def _layer(self, index: int, heads: int, joined: bool) -> LayerKV:
        def halves(data: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
            if data is None:
                return None, None
            if joined:
                return data[index, :, :, :heads], data[index, :, :, heads:]
            return data[2 * index], data[2 * index + 1]

        k, v = halves(self._codes)
        assert k is not None and v is not None
        return LayerKV(k, v, *halves(self._scales))

    @property
    def device(self) -> torch.device:
        return self._codes.device

    @property
    def page_bytes(self) -> int:
        return sum(part[:, 0].numel() * part.element_size() for part in self._parts)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def page_buffer(self, count: int, device: torch.device | str, *, pinned: bool = False) -> list[torch.Tensor]:
        """Room for ``count`` whole pages: one tensor per part, [count, layers, ...]."""
        return [
            torch.empty(count, part.shape[0], *part.shape[2:], dtype=part.dtype, device=device, pin_memory=pinned)
            for part in self._parts
        ]

    def read(self, pages: torch.Tensor, out: list[torch.Tensor]) -> None:
        """The whole content of ``pages`` (int64 [n] on this device) into the first n of ``out``, also on it."""
        for part, to in zip(self._parts, out, strict=True):
            torch.index_select(part.transpose(0, 1), 0, pages, out=to[: len(pages)])

    def write(self, pages: torch.Tensor, source: list[torch.Tensor]) -> None:
        """The reverse of :meth:`read`."""
        for part, come in zip(self._parts, source, strict=True):
            part.transpose(0, 1).index_copy_(0, pages, come[: len(pages)])

    def scrub(self, pages: torch.Tensor) -> torch.Tensor:
        """Makes what is not finite in ``pages`` (int64) zero: masked or not, it would spread to the next owner. Returns
        bool [n]: the pages where there was any."""
        spoilt = torch.zeros(len(pages), dtype=torch.bool, device=self.device)
        for data in (self._codes, self._scales):
            if data is not None and data.dtype.is_floating_point:
                for layer in data:
                    values = layer[pages] if data.dtype.itemsize > 1 else raw(layer)[pages].view(data.dtype).float()
                    spoilt |= ~values.isfinite().flatten(1).all(1)
                    clean = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
                    raw(layer)[pages] = raw(clean.to(data.dtype))
        return spoilt

    def checksums(self, pages: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the sum of each page's words (4 bytes, where they fit) times odd numbers that depend on the place.
        Any one word that changes changes it."""
        total = torch.zeros(len(pages), dtype=torch.int64, device=self.device)
        for part in self._parts:
            rows = part.flatten(3)
            fits = rows.shape[3] * rows.element_size() % 4 == 0
            words = rows.view(torch.int32 if fits else torch.uint8).flatten(2)
            weights = torch.arange(words.shape[2], device=self.device).mul_(2).add_(1).mul_(_MIX)
            for index, layer in enumerate(words):
                total += (layer[pages].long() * weights).sum(1) * (2 * index + 1)
        return total

    def flip_bit(self, page: int, *, layer: int = 0, word: int = 0, bit: int = 0) -> None:
        """A memory error, for tests of what is to notice it."""
        self._parts[0][layer, page].flatten().view(torch.uint8)[word] ^= 1 << bit

    def check_invariants(self) -> None:
        """The null page is never written. Call with no step in flight."""
        assert all(not part[:, 0].count_nonzero() for part in self._parts), "the null page was written"


def page_index(pages: list[int], device: torch.device) -> torch.Tensor:
    """int64 on ``device``. From page-locked memory, since a copy from elsewhere would wait for the steps under way."""
    index = torch.tensor(pages, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


class PendingSums:
    """Checksums of pages, made by the thread or stream that runs the steps. Implements replica.batch.Sums."""

    def __init__(self) -> None:
        self.cost_s = 1e-3
        self._done = threading.Event()
        self._event: torch.cuda.Event | None = None
        self._values: torch.Tensor | None = None
        self._error: BaseException | None = None

    def enqueue(self, kv: PagedKV, pages: list[int]) -> None:
        """Between two steps."""
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                sums = kv.checksums(page_index(pages, kv.device))
                cuda = kv.device.type == "cuda"
                self._values = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=cuda).copy_(sums, non_blocking=cuda)
                if cuda:
                    self._event = torch.cuda.Event()
                    self._event.record()
        except Exception as error:
            self._error = error
        self.cost_s = max(self.cost_s, time.perf_counter() - began)
        self._done.set()

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        if not self._done.wait(timeout):
            return False
        while self._event is not None and not self._event.query():
            if time.monotonic() >= until:
                return False
            time.sleep(1e-3)
        return True

    def result(self) -> list[int]:
        """Raises what the computation raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            self._event.synchronize()
        assert self._values is not None
        return self._values.tolist()
