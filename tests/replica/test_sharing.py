"""Which splits rows have in common, against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest

from replica.batch import Row
from replica.sharing import Sharing, find_sharing
from router.wire import Sampling

PAGE, SPLIT = 16, 64


def row(pages: list[int], start: int, count: int = 1) -> Row:
    return Row(0, start, np.zeros(count, np.int32), np.array(pages, np.int32), 1, Sampling())


def find(rows: list[Row], members: int = 4, limit: int = 99) -> Sharing | None:
    return find_sharing(rows, page_size=PAGE, split=SPLIT, members=members, limit=limit)


def test_nothing_in_common() -> None:
    apart = [row(list(range(i * 20 + 1, i * 20 + 21)), 300) for i in range(4)]
    assert find(apart) is None
    assert find([row(list(range(1, 21)), 300)]) is None
    same = list(range(1, 21))
    assert find([row(same, 63), row(same, 63)]) is None, "the split is not whole"
    assert find([row(same, 64, count=3), row(same, 64)]) is None, "chunks are not decoding"


def test_a_split_is_shared_when_it_is_all_cached() -> None:
    same = list(range(1, 21))
    found = find([row(same, 64), row(same, 127), row(same, 128)])
    assert found is not None and found.covered.tolist() == [64, 64, 64] and found.saved == 2 * 64
    assert found.items.tolist() == [[0, 0, 1, 2, -1]]


def test_large_groups_are_cut_and_a_full_list_ends_the_search() -> None:
    same = list(range(1, 40))
    rows = [row(same, 200) for _ in range(5)]
    found = find(rows)
    assert found is not None and found.covered.tolist() == [192] * 5
    assert len(found.items) == 6 and found.saved == 3 * 3 * 64
    cut = find(rows, limit=5)
    assert cut is not None and cut.covered.tolist() == [128] * 5 and len(cut.items) == 4
    assert find(rows, limit=1) is None


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int) -> None:
    """Every item names rows that show the same pages, every row is covered by items without a gap, and all that could
    be shared is."""
    rng = np.random.default_rng(seed)
    fresh = iter(rng.permutation(5000) + 1)
    stems: list[list[int]] = [[]]
    rows = []
    for _ in range(24):
        stem = stems[rng.integers(len(stems))]
        keep = stem[: rng.integers(0, len(stem) // 4 + 1) * 4]
        pages = keep + [int(next(fresh)) for _ in range(rng.integers(1, 24))]
        stems.append(pages)
        start = int(rng.integers(1, len(pages) * PAGE))
        rows.append(row(pages, start, count=int(rng.choice([1, 1, 1, 3]))))
    found = find(rows)
    seen: dict[int, list[int]] = {}
    for part, *listed in [] if found is None else found.items.tolist():
        live = [m for m in listed if m >= 0]
        assert len({tuple(rows[m].pages[: (part + 1) * 4].tolist()) for m in live}) == 1
        for m in live:
            assert rows[m].start >= (part + 1) * SPLIT and len(rows[m].token_ids) == 1
            seen.setdefault(m, []).append(part)
    for i, mine in enumerate(rows):
        extent = len(seen.get(i, []))
        assert sorted(seen.get(i, [])) == list(range(extent))
        assert found is None or found.covered[i] == extent * SPLIT
        need, more = (extent + 1) * SPLIT, (extent + 1) * 4
        if len(mine.token_ids) == 1 and mine.start >= need:
            alike = [
                other for j, other in enumerate(rows)
                if j != i and len(other.token_ids) == 1 and other.start >= need
                and other.pages[:more].tolist() == mine.pages[:more].tolist()
            ]  # fmt: skip
            assert not alike, "a split in common was not found"
