"""Content keys of full pages: the key of a page is a hash of all tokens up to its end.

Keys form a chain: the key of page n is `blake2b(key of page n - 1 + token ids of page n)`, 128 bits. The key before
page 0 is the *root*, a hash of the `cache_salt` and of everything else that K and V depend on. So equal keys mean equal
K and V on every instance, and prompts with different salts have no key in common. Pure; step thread.

Two different chains with one key would give wrong tokens. By chance that takes 2**64 pages. An attacker needs as many
hashes for a collision of two prompts of their choice, and 2**128 to match the key of another client's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from chitu.protocol import KVLayout, encode

KEY_BYTES = 16
TOKEN_BYTES = 4


def layout_fingerprint(layout: KVLayout) -> bytes:
    """Return the fingerprint of model, weights, KV layout, dtype and page size. `tp_size` does not enter it: all ranks
    together hold the same."""
    return blake2b(encode(msgspec.structs.replace(layout, tp_size=1)), digest_size=KEY_BYTES).digest()


def lasting_fingerprint(fingerprint: bytes, weights_digest: bytes, version: str, settings: Sequence[object]) -> bytes:
    """Return a fingerprint for pages that outlive a process or that other processes read. The layout covers the shapes
    of the weights only, and another version or other `settings` of the model may compute different values."""
    text = repr((version, *settings)).encode()
    return blake2b(fingerprint + weights_digest + text, digest_size=KEY_BYTES).digest()


@dataclass(slots=True)
class PageKeys:
    """The keys of one sequence's pages, each computed once."""

    root: bytes
    page_size: int
    """Tokens per page."""
    _keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, fingerprint: bytes, page_size: int, cache_salt: str = "") -> PageKeys:
        root = blake2b(cache_salt.encode(), digest_size=KEY_BYTES, key=fingerprint).digest()
        return cls(root, page_size)

    def copy(self) -> PageKeys:
        """Return a copy for a sequence that begins with the same tokens."""
        return PageKeys(self.root, self.page_size, list(self._keys))

    def upto(self, num_pages: int, token_ids: bytes) -> list[bytes]:
        """Return the keys of the first `num_pages`, all of which are full. `token_ids` (int32 LE) are those of the
        sequence; since the last call they may only have grown."""
        self._extend(num_pages, token_ids)
        return self._keys[:num_pages]

    def key_at(self, page: int, token_ids: bytes) -> bytes:
        """Return the key of one full page, in constant time if it is known."""
        self._extend(page + 1, token_ids)
        return self._keys[page]

    def _extend(self, num_pages: int, token_ids: bytes) -> None:
        keys, page_bytes = self._keys, self.page_size * TOKEN_BYTES
        key = keys[-1] if keys else self.root
        fresh = blake2b(digest_size=KEY_BYTES).copy  # a copy costs a third less than a new one
        for start in range(len(keys) * page_bytes, num_pages * page_bytes, page_bytes):
            hasher = fresh()
            hasher.update(key + token_ids[start : start + page_bytes])
            key = hasher.digest()
            keys.append(key)
