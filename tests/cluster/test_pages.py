"""Pages point at what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("helm/**/*.md")]
PATH = re.compile(r"`((?:cluster|docs|helm|kernels|replica|router|tests)/[\w./*-]+\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [m for m in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if not m.startswith(("http", "mailto"))]
    gone = [link for link in links if not (page.parent / link).exists()]
    gone += [path for path in PATH.findall(text) if not any(ROOT.glob(path))]
    assert not gone
