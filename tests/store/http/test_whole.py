"""Calls that come whole in one read, and all others, get the same answers."""

from __future__ import annotations

import re
import socket

import pytest

from agentrl.store.http.whole import whole_call

HEAD = b"POST /v1/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\n{}"


def test_a_call_that_is_whole_is_read_and_any_other_is_left_to_the_server():
    assert whole_call(WHOLE) == (
        "/v1/cursor",
        {b"host": b"localhost", b"content-type": b"application/json", b"content-length": b"2"},
        b"{}",
    )
    for other in (
        WHOLE[:-1],
        WHOLE + b" ",
        WHOLE.replace(b"POST", b"GET"),
        WHOLE.replace(b"/v1/cursor", b"/v1/traces"),
        WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
        WHOLE.replace(b"host:", b"expect: 100-continue\r\nhost:"),
        WHOLE.replace(b"host:", b"transfer-encoding: chunked\r\nhost:"),
        WHOLE.replace(b"host:", b"content-length: 2\r\nhost:"),
        WHOLE.replace(b"host:", b"content-length: 7\r\nhost:"),
        WHOLE.replace(b"host:", b"host :"),
        WHOLE.replace(b"localhost", b"local\nhost"),
        WHOLE.replace(b"localhost", b"local\rhost"),
        WHOLE.replace(b"host: localhost", b" folded"),
        WHOLE.replace(b"length: 2", b"length: +2"),
        HEAD * 900 + WHOLE,
    ):
        assert whole_call(other) is None, other


@pytest.mark.parametrize("cut", [0, 10, 60, len(WHOLE) - 1])
def test_calls_sent_at_once_are_answered_in_order_however_they_are_cut(address, cut):
    """Whole ones, halves, and one that is refused between them."""
    host, port = address.removeprefix("http://").split(":")
    keyed = WHOLE.replace(b"host:", b"authorization: Bearer admin-secret\r\nhost:")
    wrong = keyed.replace(b"{}", b"[]")
    sent = keyed + keyed + wrong + keyed
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(sent[: len(keyed) + cut])
        client.sendall(sent[len(keyed) + cut :])
        answer = b""
        while answer.count(b"HTTP/1.1 ") < 4 or not answer.endswith(b"\r\n\r\n0"):
            part = client.recv(4096)
            assert part, answer
            answer += part
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"422", b"200"]
