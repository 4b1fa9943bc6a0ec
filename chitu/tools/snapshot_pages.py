"""A snapshot of a running request with its pages of KV: one file, which continues it in another cluster without
computing these pages anew (`chitu snapshot --pages`, `chitu restore`).

The pages come from the folder `cache.disk.path` of the one cluster and go into that of the other, under the keys that
follow from tokens, layout, weights and version; so pages of other weights cannot be found by mistake, and are refused
by name before. The file is `MAGIC`, the lengths of the two parts (little endian), a header (JSON), the request
(`protocol/kept_request.py`), the records, and a SHA-256 of everything before it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chitu import __version__
from chitu.config.schema import Topology
from chitu.errors import ConfigError, IncompatibleLayout
from chitu.known_types import known
from chitu.kv_cache.prefix_index import PageKeys, lasting_fingerprint, layout_fingerprint
from chitu.kv_cache.tiers.pages import is_whole
from chitu.launch.router_client import RouterClient
from chitu.models.config import weights_digest
from chitu.protocol import KVLayout, pack_i32
from chitu.protocol.kept_request import DamagedFile, KeptRequest, unpack

MAGIC = b"chituSP1"
_LENGTHS = struct.Struct("<8sQQ")
DIGEST_BYTES = 32
FOLDER = "restored"
"""Folder beside those of the instances, for the pages of snapshots; instances read it as one of another instance."""


class PagesHeader(msgspec.Struct, frozen=True):
    fingerprint: str
    """Of layout, weights and version, in hex: pages of another one are of no use."""
    keys: list[str]
    """Of the records, in order of the tokens, in hex."""
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """What the keys of a cluster's pages are made with, and where they are."""

    topology: Topology
    layout: KVLayout
    fingerprint: bytes
    disk: Path

    @classmethod
    def of(cls, client: RouterClient) -> Source:
        """Ask the cluster, and read all of its weights. Raise ConfigError if it keeps no pages on this machine."""
        topology = client.topology()
        layout = next((each.layout for each in client.cluster().instances if each.layout is not None), None)
        disk, path = topology.cache.disk.path, topology.model.path
        if layout is None:
            raise ConfigError(f"no instance of {client.url} is up")
        if disk is None or not Path(disk).is_dir() or not Path(path).exists():
            raise ConfigError(
                f"{client.url} has its pages in cache.disk.path ({disk}) and its weights in {path}: run this on a "
                "machine that has both folders"
            )
        model = topology.model
        settings = (model.dtype, model.max_model_len)
        found = lasting_fingerprint(layout_fingerprint(layout), weights_digest(path), __version__, settings)
        return cls(topology, layout, found, Path(disk))

    def keys(self, record: KeptRequest) -> list[bytes]:
        """Return the keys of the full pages of a request's tokens. Raise ConfigError for one whose keys need more."""
        if record.images or record.adapter_hash:
            raise ConfigError(f"request {record.request_id!r} has images or an adapter: save it without --pages")
        body = msgspec.json.decode(record.body)
        if body.get("cache_prompt") is False:
            raise ConfigError(f"request {record.request_id!r} keeps no pages (cache_prompt: false)")
        tokens = [*record.prompt_token_ids, *record.token_ids]
        size = self.layout.page_size
        keys = PageKeys.of(self.fingerprint, size, record.tenant + (body.get("cache_salt") or ""))
        return keys.upto(len(tokens) // size, pack_i32(tokens))


def with_pages(data: bytes, source: Source) -> tuple[bytes, int]:
    """Return the file of a request with its leading pages that are on disk, and their number."""
    found: list[tuple[bytes, bytes]] = []
    for key in source.keys(unpack(data)):
        page = _page(source.disk, key)
        if page is None:
            break
        found.append((key, page))
    header = msgspec.json.encode(
        PagesHeader(source.fingerprint.hex(), [key.hex() for key, _ in found], len(found[0][1]) if found else 0)
    )
    whole = b"".join([_LENGTHS.pack(MAGIC, len(header), len(data)), header, data, *[page for _, page in found]])
    return whole + hashlib.sha256(whole).digest(), len(found)


def _page(disk: Path, key: bytes) -> bytes | None:
    """Return the record of a page from the folder of any instance; None if none has it whole."""
    for path in disk.glob(f"*/{key.hex()}.kv"):
        try:
            page = path.read_bytes()
        except OSError:  # evicted meanwhile
            continue
        if is_whole(memoryview(page), key):
            return page
    return None


def read(data: bytes) -> tuple[PagesHeader, bytes, Sequence[bytes]]:
    """Return header, request and records of a file. Raise DamagedFile unless it is what was written."""
    if len(data) < _LENGTHS.size + DIGEST_BYTES or data[: len(MAGIC)] != MAGIC:
        raise DamagedFile("it is no snapshot with pages")
    whole, digest = memoryview(data)[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(whole).digest() != digest:
        raise DamagedFile("checksum mismatch: the file was modified or truncated")
    _, header_bytes, request_bytes = _LENGTHS.unpack_from(whole)
    start = _LENGTHS.size + header_bytes
    header = msgspec.json.decode(whole[_LENGTHS.size : start], type=known(PagesHeader))
    request, rest = bytes(whole[start : start + request_bytes]), whole[start + request_bytes :]
    size = header.record_bytes
    records = [bytes(rest[place * size : (place + 1) * size]) for place in range(len(header.keys))]
    for key, record in zip(header.keys, records, strict=True):
        if not is_whole(memoryview(record), bytes.fromhex(key)):
            raise DamagedFile(f"the page {key} is not what its key says")
    return header, request, records


def restore(data: bytes, target: Source, name: str) -> tuple[KeptRequest, int]:
    """Put the pages and the request of a file where the cluster finds them: the request as `name`, last, so that it
    continues with its pages. Return it, and the number of pages. Raise DamagedFile, IncompatibleLayout and
    ConfigError; then nothing was put anywhere."""
    header, request, records = read(data)
    record = unpack(request)
    folder = target.topology.dp_config.router.kept_requests.dir
    if folder is None:
        raise ConfigError("the cluster has no dp_config.router.kept_requests.dir, where it would find the request")
    if header.fingerprint != target.fingerprint.hex():
        raise IncompatibleLayout(
            f"the pages of request {record.request_id!r} are of another layout, other weights or another release than "
            "the cluster's; a snapshot without --pages continues by computing"
        )
    pages = target.disk / FOLDER
    pages.mkdir(exist_ok=True)
    for key, page in zip(header.keys, records, strict=True):
        _put(pages / f"{key}.kv", page)
    Path(folder).mkdir(parents=True, exist_ok=True)
    _put(Path(folder, f"{name}.request"), request)
    return record, len(records)


def _put(path: Path, data: bytes) -> None:
    """Write a file that only its owner reads, which gets its name when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    os.replace(partial, path)
