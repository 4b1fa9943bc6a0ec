"""What this router asks of the other ones: operators' calls on which two routers must not decide at once.

The first living router of the list decides (`PDCoordination.routers`); each call goes to it over the HTTP API that it
has alone. Loop thread; the connection is made and read in another one. A router asks none behind it in the list, so no
call goes round.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from chitu.config.schema import RouterConfig
from chitu.config.topology import api_url, own_api_port, own_api_url, router_hosts, same_host
from chitu.errors import Forbidden, NoInstance, Unauthorized, from_code
from chitu.known_types import known
from chitu.net.client import JSON, NETWORK_ERRORS, Server
from chitu.net.curve import ClusterSecrets
from chitu.net.http import ErrorReply

logger = logging.getLogger(__name__)

REPLY_S = 5.0
"""Time to connect, and time to answer from memory. A router that takes longer is taken for silent soon."""

ReplyT = TypeVar("ReplyT")


class OtherRouters:
    def __init__(self, config: RouterConfig, index: int, secrets: ClusterSecrets | None) -> None:
        """`config`: of all routers. `index`: that of this one."""
        self._config, self.index = config, index
        credential = secrets.token if secrets is not None else next(iter(config.api_keys), "")
        self._headers = dict(JSON)
        if credential:
            self._headers["Authorization"] = f"Bearer {credential}"

    async def ask(self, living: Sequence[int], path: str, body: Mapping[str, Any], kind: type[ReplyT]) -> ReplyT | None:
        """Return the answer of the router that decides; None if this one does. `living`: indices, in order. Raises the
        error that it answers with, and NoInstance if it, or what else listens there, gives no answer of a router."""
        for index in living:
            if index >= self.index:
                break
            url = self._url(index)
            logger.info("%s is asked of the router at %s, which decides", path, url)
            try:
                asked = partial(Server.at(url).ask, "POST", path, json.dumps(body).encode(), self._headers)
                reply = await asyncio.to_thread(asked, timeout_s=REPLY_S)
                if reply.status == 200:
                    return msgspec.json.decode(reply.body, type=known(kind))
                said = msgspec.json.decode(reply.body, type=known(ErrorReply)).error
            except ConnectionRefusedError:  # its process has ended, and the instances do not know yet
                logger.warning("no router listens at %s any more", url)
                continue
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise NoInstance(f"what answers at {url} is not the router which decides on this: {error}") from error
            except NETWORK_ERRORS as error:
                reason = str(error) or type(error).__name__
                raise NoInstance(f"the router at {url}, which decides on this, does not answer: {reason}") from error
            refusal = from_code(said.code or "internal", said.message)
            if isinstance(refusal, Unauthorized | Forbidden):
                raise Forbidden(f"the router at {url} decides on this, so ask it there: {said.message}")
            raise refusal
        return None

    def _url(self, index: int) -> str:
        """Return where another router has its API alone. `http_host` is an address of this machine."""
        hosts = [same_host(host) for host in router_hosts(self._config)]
        if hosts[index] == hosts[self.index]:
            return own_api_url(self._config, index)
        return api_url(router_hosts(self._config)[index], own_api_port(self._config, index))
