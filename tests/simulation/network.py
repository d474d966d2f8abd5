"""The simulated network: connections to the store's server, and calls of policy servers.

A message takes a while. Faults lose a request or its answer, or deliver a request twice or late. A
late request's connection breaks at once, so the client repeats it, and the first comes second.
Invariant: messages to a killed process are lost, and its peers see their connections break.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

LATENCY = 0.004  # seconds of a message, on average
LATE = 20.0  # seconds
PACKET = 1000  # bytes of a request's body, above which it comes in two parts


class Network:
    def __init__(self, world: World) -> None:
        self.world, self.loop = world, world.loop
        self.servers: dict[str, Any] = {}  # policy servers, by their URL
        self.store: tuple[Process, Any] | None = None  # server of the store, and its application
        self.gateway: Any = None  # of a live run, with its process
        self.loop.connect = self.connect

    def delay(self) -> float:
        return self.loop.random.random() * 2 * LATENCY

    # -- policy servers ----------------------------------------------------------------------------

    async def ask_model(self, url: str, body: bytes) -> tuple[dict[str, str], bytes]:
        loop, server, is_lost = self.loop, self.servers.get(url), self.world.system.is_lost
        await asyncio.sleep(self.delay())
        if server is None or not server.process.alive:
            raise aiohttp.ClientConnectionError("refused")
        if is_lost("request"):
            raise aiohttp.ClientConnectionError("reset")
        answer, here = loop.create_future(), contextvars.copy_context()

        async def serve() -> None:
            result = await server.answer(body)
            loop.call_later(self.delay(), _deliver, answer, result, context=here)

        server.process.owned.append(
            lambda: loop.call_later(self.delay(), _deliver, answer, None, context=here)
        )
        loop.create_task(serve(), context=server.process.context.copy())
        reply: tuple[dict[str, str], bytes] | None = await answer
        if reply is None or is_lost("response"):
            raise aiohttp.ClientConnectionError("reset")
        return reply

    # -- the store's server ------------------------------------------------------------------------

    async def connect(self, factory: Any, host: str, port: int, **more: Any) -> Any:
        await asyncio.sleep(self.delay())
        if self.store is None or not self.store[0].alive:
            raise ConnectionRefusedError(f"{host}:{port}")
        protocol = factory()
        transport = Transport(self, protocol, *self.store)
        protocol.connection_made(transport)
        return transport, protocol


def _deliver(future: Any, result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Transport(asyncio.Transport):
    """A client's end of a connection. Each write is a whole request."""

    def __init__(self, network: Network, protocol: Any, server: Process, app: Any) -> None:
        self.network, self.protocol, self.server, self.app = network, protocol, server, app
        self.loop, self.here = network.loop, contextvars.copy_context()
        self.client = network.world.system.here()
        self.gone = self.loop.create_future()  # for the server: the client has disconnected
        self.open = True
        server.owned.append(lambda: self.break_off("the server ended"))
        self.client.owned.append(self._hang_up)

    def abort(self) -> None:
        self._hang_up()

    close = abort

    def is_closing(self) -> bool:
        return not self.open

    def _hang_up(self) -> None:
        self.open = False
        if not self.gone.done():
            self.gone.set_result(None)

    def break_off(self, why: str) -> None:
        """Let the client see the end of the connection."""
        if self.open and self.client.alive:
            self.loop.call_later(
                self.network.delay(), self._lost, ConnectionResetError(why), context=self.here
            )
        self._hang_up()

    def _lost(self, error: Exception) -> None:
        self.protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        is_lost = self.network.world.system.is_lost
        if not self.open:
            return
        request = parsed(bytes(data))
        if is_lost("request"):
            self.break_off("the request was lost")
        elif is_lost("late"):
            self._send(request, LATE * self.loop.random.random(), heard=False)
            self.break_off("the request is late")
        else:
            self._send(request, self.network.delay())
            if is_lost("twice"):
                self._send(request, LATE * self.loop.random.random(), heard=False)

    def _send(self, request: Any, delay: float, *, heard: bool = True) -> None:
        context = self.server.context.copy()
        self.loop.call_later(delay, self._arrive, request, heard, context=context)

    def _arrive(self, request: Any, heard: bool) -> None:
        server = self.network.store  # a late one may come to the next process
        if server is not None and server[0].alive:
            work = self._serve(server[1], request, heard)
            self.loop.create_task(work, context=server[0].context.copy())

    async def _serve(self, app: Any, request: Any, heard: bool) -> None:
        scope, body = request
        half = len(body) // 2 if len(body) > PACKET else 0
        events = [{"type": "http.request", "body": body[half:]}]
        if half:
            events.append({"type": "http.request", "body": body[:half], "more_body": True})
        answered = list[Any]()

        async def receive() -> Any:
            if events:
                return events.pop()
            if not self.gone.done() and heard:
                await asyncio.wait((self.gone,))
            elif not heard:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            answered.append(message)

        await app(scope, receive, send)
        if not answered or not heard or self.network.world.system.is_lost("silence"):
            return
        if self.network.world.system.is_lost("response"):
            self.break_off("the response was lost")
        else:
            self.loop.call_later(
                self.network.delay(), self._answer, encoded(answered), context=self.here
            )

    def _answer(self, data: bytes) -> None:
        if self.open:
            self.protocol.data_received(data)


def parsed(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The ASGI scope and the body of a request."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, path, _ = first.decode().split(" ")
    headers = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]
    lower = [(name.lower(), value) for name, value in headers]
    return {"type": "http", "method": method, "path": path, "headers": lower}, body


def encoded(messages: list[Any]) -> bytes:
    start, *parts = messages
    lines = b"".join(b"%b: %b\r\n" % header for header in start["headers"])
    body = b"".join(part.get("body", b"") for part in parts)
    return b"HTTP/1.1 %d X\r\n%b\r\n%b" % (start["status"], lines, body)
