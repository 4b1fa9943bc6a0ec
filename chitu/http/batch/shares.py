"""How much of the folder of files and batches a tenant may have, and what is removed first when that is full. Pure.

Up to four tenants have equal parts. Of more, each has at most a quarter of what the others leave, as clients have of
other things that they share (`net/fair_share.py`): so one that comes later always finds some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chitu.http.batch.index import FolderView
from chitu.net.fair_share import SHARE

MAX_EQUAL = SHARE + 1
"""Tenants up to which their parts are equal."""


class Bounds(NamedTuple):
    max_files: int
    max_bytes: int
    num_tenants: int


class Room(NamedTuple):
    removed: list[str]
    """Files and batches that have to be removed for it."""
    refusal: str
    """Why there is no room; then nothing is to be removed. Empty if there is."""


def share_of(whole: int, others: int, num_tenants: int) -> int:
    """Return how much of `whole` a tenant may have while all others have `others`."""
    return whole // num_tenants if num_tenants <= MAX_EQUAL else max(0, whole - others) // MAX_EQUAL


def room_for(view: FolderView, bounds: Bounds, tenant: str, num_files: int, num_bytes: int) -> Room:
    """Return whether a tenant may have so many more files and bytes, once what is past its use is removed."""
    own_files, own_bytes = view.held_files[tenant], view.held_bytes[tenant]
    all_files, all_bytes = view.held_files.total(), view.held_bytes.total()

    def refusal(freed_files: int, freed_bytes: int) -> str:
        amounts = (
            (bounds.max_files, all_files, own_files, freed_files, num_files, "files and batches", "max_files"),
            (bounds.max_bytes, all_bytes, own_bytes, freed_bytes, num_bytes, "bytes", "max_mb"),
        )
        for whole, held, own, freed, more, unit, key in amounts:
            share = share_of(whole, held - own, bounds.num_tenants)
            end = f"{unit} (router.batches.{key}), and no room for {more} more: delete some"
            if held - freed + more > whole:
                return f"the server's folder has {held - freed} of at most {whole} {end}"
            if own - freed + more > share:
                return f"this client has {own - freed} of its share of {share} {end}"
        return ""

    return _room(view, tenant, refusal)


def room_to_grow(view: FolderView, bounds: Bounds, tenant: str) -> Room:
    """Return whether the outputs of a tenant's running batches may grow. What others took later does not hold
    them up, so the bound is the largest share."""
    own_bytes = view.held_bytes[tenant]
    share = bounds.max_bytes // min(bounds.num_tenants, MAX_EQUAL)

    def refusal(freed_files: int, freed_bytes: int) -> str:
        has = own_bytes - freed_bytes
        return f"this client has {has} of at most {share} bytes (router.batches.max_mb): delete some" * (has > share)

    return _room(view, tenant, refusal)


def _room(view: FolderView, tenant: str, refusal: Callable[[int, int], str]) -> Room:
    """Remove what is past its use, until nothing is refused."""
    removed: list[str] = []
    why_not = refusal(0, 0)
    for names in past_use(view, tenant) if why_not else ():
        removed += names
        why_not = refusal(len(removed), sum(view.num_bytes[name] for name in removed))
        if not why_not:
            return Room(removed, "")
    return Room([], why_not)


def past_use(view: FolderView, tenant: str) -> list[list[str]]:
    """Return what of a tenant may be removed for something new, in this order: batches that are over, the oldest first,
    each with its output files, if these have been read to the end. Batches with one that has not come last, and it
    stays."""
    files = view.files.values()
    outputs = {file.id: file for file in files if file.tenant == tenant and file.purpose == "batch_output"}
    groups: list[tuple[bool, int, list[str]]] = []
    for batch in view.batches.values():
        if batch.tenant == tenant and batch.is_over:
            own = [name for name in (batch.output_file_id, batch.error_file_id) if outputs.pop(name, None)]
            read = [name for name in own if name in view.read]
            groups.append((len(read) < len(own), batch.created_at, [batch.id, *read]))
    groups += [(False, file.created_at, [name]) for name, file in outputs.items() if name in view.read]
    return [names for _, _, names in sorted(groups)]
