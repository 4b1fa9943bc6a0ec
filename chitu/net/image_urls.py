"""Which URLs of images a client may name: hosts, ports and addresses that are fetched from. Pure.

A URL of a client is a request that this machine makes, from within the operator's network. So only hosts are asked that
the operator lists by name, and an address that is not of the public internet only if it is listed itself.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import quote, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 8192
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
"""Characters that parsers of URLs disagree about."""
_SAFE = "/?%:@!$&'()*+,;=~-._[]|"
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PRIVATE = ("192.0.0.0/24", "168.63.129.16/32", "64:ff9b:1::/48", "2001::/23", "3fff::/20", "5f00::/16")
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, _PRIVATE))
"""Networks that not every Python knows as private: of protocols, and a cloud's own services."""
_EMBEDDING_BITS = 32


class URLRefused(ValueError):
    """The text is a sentence for the client, without its subject."""


def is_http(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


class ImageURL(NamedTuple):
    scheme: str
    host: str
    """In lower case, ASCII; of an IPv6 address without brackets."""
    port: int
    target: str
    """Path and query, as a request has them."""

    @classmethod
    def parse(cls, url: str) -> ImageURL:
        """Raise URLRefused for what is no plain URL of HTTP."""
        if len(url) > MAX_URL_CHARS:
            raise URLRefused(f"is a URL of more than {MAX_URL_CHARS} characters")
        if _FORBIDDEN.search(url):
            raise URLRefused("is a URL with a space, a backslash or a control character")
        try:
            parts = urlsplit(url)
            scheme, name, port = parts.scheme.lower(), parts.hostname or "", parts.port
            host = (name if name.isascii() else name.encode("idna").decode()).rstrip(".")
        except (ValueError, UnicodeError):
            raise URLRefused("is no valid URL") from None
        if scheme not in PORTS or not host:
            raise URLRefused("is no URL of http or https with a host")
        if "@" in parts.netloc:
            raise URLRefused("is a URL with a user or password")
        path = quote(parts.path or "/", safe=_SAFE)
        query = f"?{quote(parts.query, safe=_SAFE)}" if parts.query else ""
        return cls(scheme, host.lower(), PORTS[scheme] if port is None else port, path + query)

    @property
    def authority(self) -> str:
        """What the header Host has."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class AllowedHosts:
    """`router.images.hosts`: names, `*.` and a name, or addresses; each may have a port."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._names: set[tuple[str, int | None]] = set()
        self._addresses: set[tuple[Address, int | None]] = set()
        for entry in hosts:
            host, port = _split(entry)
            address = _address(host)
            if address is None:
                self._names.add((host, port))
            else:
                self._addresses.add((address, port))

    def require(self, url: ImageURL) -> None:
        """Raise URLRefused for a host or port that is not listed."""
        address = _address(url.host)
        if address is not None:
            if not self._lists(address, url.port):
                raise URLRefused("is of a host that images are not fetched from (router.images.hosts)")
            return
        labels = url.host.split(".")
        names = [url.host, *(f"*.{'.'.join(labels[i:])}" for i in range(1, len(labels)))]
        ports = (url.port, None) if url.port in PORTS.values() else (url.port,)
        if not any((name, port) in self._names for name in names for port in ports):
            raise URLRefused("is of a host or port that images are not fetched from (router.images.hosts)")

    def require_address(self, text: str, port: int) -> None:
        """Raise URLRefused for an address, which a name has, that is not public and not listed."""
        address = _address(text)
        if address is None or not (is_public(address) or self._lists(address, port)):
            raise URLRefused("is of a host whose address is not public")

    def _lists(self, address: Address, port: int) -> bool:
        return (address, port) in self._addresses or (port in PORTS.values() and (address, None) in self._addresses)


def is_public(address: Address) -> bool:
    """Return whether an address is of the public internet, also one that has another within it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & ((1 << _EMBEDDING_BITS) - 1))
        if inner is not None:
            return is_public(inner)
        if address.is_site_local or address.scope_id is not None or address.teredo is not None:
            return False
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified or address.is_private)
        and not any(address in network for network in _NOT_PUBLIC)
    )


def _split(entry: str) -> tuple[str, int | None]:
    """Return host and port of an entry of the list."""
    text = entry.strip().lower().rstrip(".")
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        text, port = host, rest.removeprefix(":")
    elif text.count(":") == 1:
        text, _, port = text.partition(":")
    else:
        port = ""
    return text, int(port) if port.isdecimal() else None


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
