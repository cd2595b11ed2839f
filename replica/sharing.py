"""Which splits of the context the rows of a step have in common: those whose last page is one and the same.

A page stands for its whole prefix, so two block tables that show the same page at the same place hold the same tokens
up to there, and reading one of them serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replica.batch import Row


@dataclass
class Sharing:
    """items int32 [n, 1 + members]: split, then rows (-1: none). covered int32 [R]: leading tokens of each row that
    items cover. saved: tokens of KV that need not be read again."""

    items: np.ndarray
    covered: np.ndarray
    saved: int


def find_sharing(rows: Sequence[Row], *, page_size: int, split: int, members: int, limit: int) -> Sharing | None:
    """Of rows with one new token; None: no two have a split in common. At most ``limit`` items of ``members`` rows."""
    per = split // page_size
    tables = [row.pages[per - 1 : row.start // page_size if len(row.token_ids) == 1 else 0 : per] for row in rows]
    depth = max(map(len, tables))
    if depth == 0 or len({table[0] for table in tables if len(table)}) == sum(len(table) > 0 for table in tables):
        return None
    last = np.zeros((len(rows), depth), np.int64)
    for i, table in enumerate(tables):
        last[i, : len(table)] = table
    items: list[np.ndarray] = []
    covered = np.zeros(len(rows), np.int32)
    saved = 0
    alive = np.flatnonzero(last[:, 0])
    for part in range(depth):
        groups = _groups(alive[last[alive, part] > 0], last[:, part])
        found = [_item(part, some, members) for group in groups for some in _pieces(group, members)]
        if not found or len(items) + len(found) > limit:
            break
        items += found
        alive = np.concatenate(groups)
        covered[alive] = (part + 1) * split
        saved += (len(alive) - len(found)) * split
    return Sharing(np.stack(items), covered, saved) if items else None


def _groups(rows: np.ndarray, key: np.ndarray) -> list[np.ndarray]:
    """Rows with equal keys, where there are at least two."""
    ordered = rows[np.argsort(key[rows], kind="stable")]
    cuts = np.flatnonzero(np.diff(key[ordered])) + 1
    return [group for group in np.split(ordered, cuts) if len(group) > 1]


def _pieces(group: np.ndarray, size: int) -> list[np.ndarray]:
    return [group[at : at + size] for at in range(0, len(group), size)]


def _item(part: int, group: np.ndarray, members: int) -> np.ndarray:
    item = np.full(1 + members, -1, np.int32)
    item[0], item[1 : 1 + len(group)] = part, group
    return item
