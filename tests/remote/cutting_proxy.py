"""A TCP proxy that cuts connections to a server, together with all data in transit."""

from __future__ import annotations

import asyncio
import random
import threading


class CuttingProxy:
    """Ends every connection after a random time of ``mean`` seconds on average. Attributes: address: the address to
    connect to. cuts: number of connections that it has cut.
    """

    def __init__(self, address: str, mean: float, seed: int = 0) -> None:
        host, port = address.rsplit(":", 1)
        self._target, self._mean, self._chance = (host, int(port)), mean, random.Random(seed)
        self.cuts = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        async with server:
            await self._stop.wait()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()

        jobs = [asyncio.ensure_future(pump(reader, back)), asyncio.ensure_future(pump(there, writer))]
        stopped = asyncio.ensure_future(self._stop.wait())
        limit = self._chance.expovariate(1 / self._mean)
        done, _ = await asyncio.wait([*jobs, stopped], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        self.cuts += not done
        for job in (*jobs, stopped):
            job.cancel()
        await asyncio.wait([*jobs, stopped])
        for job in jobs:
            if not job.cancelled():
                job.exception()
        writer.transport.abort()
        back.transport.abort()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
