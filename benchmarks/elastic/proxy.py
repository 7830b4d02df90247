"""TCP proxies on loopback that can stop forwarding, as a network that loses a link does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread

CHUNK = 1 << 16  # bytes read at once


class Proxies:
    """Ports on loopback that lead to one server; each can be cut off and joined again.

    A proxy that is cut off accepts connections and forwards nothing. What has been sent
    arrives once it is joined, as TCP would send it again.

    Args:
        host: of the server.
        port: of the server.
        count: number of proxies.

    Attributes:
        ports: where the proxies listen.
    """

    def __init__(self, host: str, port: int, count: int) -> None:
        self.ports: Sequence[int] = ()
        self._server = (host, port)
        self._loop = asyncio.new_event_loop()
        self._forwards = [asyncio.Event() for _ in range(count)]
        self._listening = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._listening.wait()

    def cut(self, number: int) -> None:
        """Stop forwarding."""
        self._loop.call_soon_threadsafe(self._forwards[number].clear)

    def join(self, number: int) -> None:
        """Forward again."""
        self._loop.call_soon_threadsafe(self._forwards[number].set)

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _listen(self) -> None:
        ports = []
        for forwards in self._forwards:
            forwards.set()

            async def connected(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                forwards: asyncio.Event = forwards,
            ) -> None:
                await self._connected(reader, writer, forwards)

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            ports.append(server.sockets[0].getsockname()[1])
        self.ports = ports
        self._listening.set()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forwards: asyncio.Event
    ) -> None:
        await forwards.wait()
        try:
            answers, requests = await asyncio.open_connection(*self._server)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            _forward(reader, requests, forwards), _forward(answers, writer, forwards)
        )


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forwards: asyncio.Event
) -> None:
    """Copy what is read until the end, unless it is cut off; then wait."""
    with suppress(OSError):
        while chunk := await reader.read(CHUNK):
            await forwards.wait()
            writer.write(chunk)
            await writer.drain()
    await forwards.wait()  # the end of a connection does not pass either
    with suppress(OSError):
        writer.close()
