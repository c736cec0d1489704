"""The HTTP side of the client: one pool of connections to one server, no call sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import orjson

from runtime.engines.keepalive import CLIENT_KEEPALIVE_S, check_keepalive_order
from runtime.errors import ContractViolation, TransportError
from runtime.waits import InfraWait, Wait, stretched


class Connection:
    """Connections to one server, made when needed and kept for at most CLIENT_KEEPALIVE_S.

    Args:
        url: base address, without a slash at the end.
        api_key: bearer token, where the server wants one.
        max_connections: at once; a call over it waits within its own deadline.
        connect_s: limit of opening one.
    """

    def __init__(
        self, url: str, *, api_key: str | None, max_connections: int, connect_s: float
    ) -> None:
        check_keepalive_order()
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._max_connections = max_connections
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections, for good: a call that comes later, or runs, fails. Idempotent."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        limit_s: float,
        kind: InfraWait,
    ) -> tuple[int, object]:
        """One control call within its stretched limit; WaitTimeout names it."""
        raw = None if body is None else orjson.dumps(body)
        async with Wait(f"{self._url}{path}", stretched(kind, limit_s), unstretched_s=limit_s):
            return await self.send(method, path, raw)

    async def send(self, method: str, path: str, raw: bytes | None) -> tuple[int, object]:
        """Send one request once.

        Returns:
            The status, and the parsed JSON or the text of the body.

        Raises:
            TransportError: if the connection is refused, reset or lost, and the request may have
                run; or if this was closed before, and nothing was sent.
            ContractViolation: if the body of a 200 claims to be JSON and is not.
        """
        try:
            async with self._open().request(method, self._url + path, data=raw) as response:
                content = await response.read()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                # Nobody cancelled the caller: aiohttp does that to who waits for a connection of a
                # session that is being closed, and its task would end without a word.
                raise self._closed() from error
            raise
        except aiohttp.ConnectionTimeoutError as error:
            raise TransportError(f"no connection to {self._url}", url=self._url) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TransportError(
                f"connection to {self._url} lost: {error!r}", url=self._url, exception=repr(error)
            ) from error
        if response.content_type == "application/json":
            try:
                return response.status, orjson.loads(content)
            except orjson.JSONDecodeError as error:
                # A gateway's error may carry the type of what it stands in front of: the status
                # says more than the body.
                if response.status != 200:
                    return response.status, content.decode(errors="replace")
                raise ContractViolation(f"{path} answered broken JSON", url=self._url) from error
        return response.status, content.decode(errors="replace")

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            # Whoever still holds it asks an engine that is gone: nobody would close a new session.
            raise self._closed()
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._max_connections, keepalive_timeout=CLIENT_KEEPALIVE_S
            )
            # The total limit is each call's own; connecting has one for all.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
            # Engines set no cookies and compress nothing: looking for either costs every call.
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        return self._session

    def _closed(self) -> TransportError:
        return TransportError(f"the client of {self._url} was closed", url=self._url)
