"""The other API processes of this router (`router.workers`), asked over HTTP on the loopback interface.

Owned by the `ApiEndpoint` of each process, on its loop. Beside the shared port of the API, each process has a port of
its own, which the cluster view names; its record is at `/admin/record` there. Operators' requests about the cluster go
to process 0, which keeps the membership. Every wait has a timeout.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from chitu.config.schema import RouterConfig
from chitu.errors import ChituError, Internal, from_code
from chitu.http.access import process_token
from chitu.http.cluster_snapshot import WorkerReport
from chitu.net.curve import ClusterSecrets
from chitu.protocol import ApiProcess, ClusterView

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
REPORT_S = 0.5
"""Timeout for the report of a process; after it, the last known report is used."""
BEHIND_S = 0.01
"""Pause before a process that lacks the newest view is asked again."""
ANSWER_S = 2.0
"""Timeout for what only process 0 can do, and for aborts."""

_decode_report = msgspec.msgpack.Decoder(WorkerReport).decode


class Siblings:
    def __init__(self, config: RouterConfig, secrets: ClusterSecrets | None, index: int) -> None:
        """`index`: index of this process, which is not one of the siblings."""
        credential = process_token(config, secrets)
        self._authorization = f"Authorization: Bearer {credential}\r\n" if credential else ""
        self._index = index
        self._others: tuple[ApiProcess, ...] = ()
        self._newest: dict[int, WorkerReport] = {}
        """Newest report by incarnation."""

    def on_view(self, view: ClusterView) -> None:
        self._others = tuple(process for process in view.workers if process.index != self._index)
        self._newest = {
            p.incarnation: self._newest[p.incarnation] for p in self._others if p.incarnation in self._newest
        }

    async def reports(self, view: ClusterView) -> list[WorkerReport]:
        """Return the reports of all other processes, made after this call and with `view` or a newer one. If a process
        does not answer, its last known report is returned."""
        if not self._others:
            return []
        reports = await asyncio.gather(*(self._report(process, view.version) for process in self._others))
        return [report for report in reports if report is not None]

    async def ask_first(self, path: str, body: bytes, takes_s: float = 0.0) -> bytes:
        """Return the answer of process 0 to a POST, which may take `takes_s` there. Raises the error that it answers,
        or Internal if there is none."""
        first = next((process for process in self._others if process.index == 0), None)
        if first is None:
            raise Internal("this API process has not received a cluster view that names process 0 yet; try again")
        try:
            async with asyncio.timeout(ANSWER_S + takes_s):
                status, content = await self._ask(first.port, "POST", path, body)
            if status == 200:
                return content
            error = msgspec.json.decode(content)["error"]
            refusal: ChituError = from_code(error["code"], error["message"])
        except (OSError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise Internal(f"the process that keeps the membership does not answer: {error!r}") from error
        raise refusal

    async def abort(self, name: str, tenant: str) -> int:
        """Abort in all other processes and return the number of requests that they ended; see `RunningAnswers.abort`.
        Internal if one does not answer."""
        body = msgspec.json.encode({"rid": name, "tenant": tenant})
        return sum(await asyncio.gather(*(self._abort(process, body) for process in self._others)))

    async def _abort(self, process: ApiProcess, body: bytes) -> int:
        try:
            async with asyncio.timeout(ANSWER_S):
                status, content = await self._ask(process.port, "POST", "/admin/abort", body)
            if status != 200:
                raise ValueError(f"status {status}")
            return int(msgspec.json.decode(content)["aborted"])
        except ConnectionError:
            return 0  # the process has ended or not started, so it has no requests
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Internal(f"API process {process.index} does not answer: {error!r}") from error

    async def _report(self, process: ApiProcess, view_version: int) -> WorkerReport | None:
        try:
            async with asyncio.timeout(REPORT_S):
                while True:
                    status, content = await self._ask(process.port, "GET", "/admin/record", b"")
                    if status != 200:
                        raise ValueError(f"status {status}")
                    report = self._newest[process.incarnation] = _decode_report(content)
                    if report.view_version >= view_version:
                        return report
                    await asyncio.sleep(BEHIND_S)
        except (OSError, TimeoutError, ValueError, LookupError) as error:
            log.warning("API process %d does not answer: %r", process.index, error)
            return self._newest.get(process.incarnation)

    async def _ask(self, port: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{self._authorization}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), content
        finally:
            writer.close()
