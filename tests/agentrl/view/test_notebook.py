"""`agentrl.show` in a notebook: from the same templates, inside a frame without scripts."""

from __future__ import annotations

import asyncio
import html

import pytest

import agentrl
from agentrl.core.errors import StoreError
from tests.agentrl.view import filled


def test_a_rollout_is_drawn_with_its_tokens_coloured(filled_store: str) -> None:
    shown = agentrl.show("run/train/g0000003/0000", store=filled_store)
    frame = shown._repr_html_()
    assert frame.startswith("<iframe sandbox srcdoc=")
    assert "<img" not in frame
    assert "<script" not in html.unescape(frame).split("srcdoc=")[1].split("<pre>")[0]
    assert shown.html.count('<span class="d') >= 1
    assert html.escape(filled.HOSTILE, quote=False).split("=")[0] in shown.html


async def test_curves_are_drawn_while_a_loop_runs(filled_store: str) -> None:
    assert asyncio.get_running_loop().is_running()
    shown = agentrl.show("run", store=filled_store)
    assert shown.html.count('class="curve') == 4
    assert repr(shown) == "<run>"


def test_what_is_not_there_is_a_sentence(filled_store: str) -> None:
    with pytest.raises(StoreError, match="no rollout 'none'"):
        agentrl.show("none", store=filled_store)
