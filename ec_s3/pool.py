"""A bounded pool of HTTP connections to one address.

Runs on one event loop. A connection is used again only after a complete answer with nothing behind
it. Nothing is opened ahead, and nothing is ever sent from here.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from ec_s3.http1 import HttpConnection

if TYPE_CHECKING:
    import ssl


class Pool:
    """Connections to one address, opened as they are needed.

    Args:
        host: name or address.
        port: TCP port.
        tls: context for https, None for http.
        connect_timeout: seconds to connect to an address, TLS included.
        read_timeout: longest silence of the peer while a request is on its way.
        size: connections in use at a time; further requests wait for their turn.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        connect_timeout: float,
        read_timeout: float,
        size: int,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._turns = asyncio.Semaphore(size)
        self._idle: list[HttpConnection] = []
        self._opening: set[asyncio.Task[HttpConnection]] = set()
        self._closed = False

    async def acquire(self, *, fresh: bool = False) -> HttpConnection:
        """Take a connection; each one taken has to be given back with `release`.

        Args:
            fresh: not one that was used before, and one such less is kept.

        Raises:
            OSError: no connection, or not in time.
        """
        await self._turns.acquire()
        try:
            while self._idle:
                connection = self._idle.pop()
                if not fresh and connection.alive:
                    return connection
                connection.abort()
                if fresh:
                    break
            return await self._open()
        except BaseException:
            self._turns.release()
            raise

    def release(self, connection: HttpConnection) -> None:
        """Give a connection back after an answer; it is closed unless that was read to its end."""
        self._turns.release()
        if self._closed:
            connection.abort()
        elif connection.rest():
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Close what is idle, and the rest as it is given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()
        for opening in self._opening:
            opening.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes their sockets in its next turn

    async def _open(self) -> HttpConnection:
        """Open a connection; a cancelled one is finished and closed, at the latest at `aclose`.

        asyncio leaks a socket that is cancelled just before its TLS handshake.
        """
        opening = asyncio.ensure_future(self._connect())
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_abandon)
            raise

    async def _connect(self) -> HttpConnection:
        """Connect to one of the host's addresses, each of which gets the whole time."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout):
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        failure: OSError = ConnectionError("the host has no address")
        for family, _, _, _, address in found:
            try:
                # not its own race of addresses: cancelled at the wrong moment, that leaks a socket
                async with asyncio.timeout(self._connect_timeout):
                    _, connection = await loop.create_connection(
                        lambda: HttpConnection(self._read_timeout),
                        *address[:2],
                        family=family,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
            except OSError as exc:
                failure = exc
            else:
                return connection
        raise failure


def _abandon(opening: asyncio.Task[HttpConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abort()
