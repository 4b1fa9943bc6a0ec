"""The files of images of running requests, which instances ask for (`FetchImage`).

Owned by `Attempts`, on the loop thread. A file is here from the first attempt of its request to the end of the request,
so that each further attempt finds it. Invariant: equal images are one file, however many requests have them.
"""

from __future__ import annotations

from collections.abc import Mapping

from chitu.errors import TooManyRequests


class ImageFiles:
    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: most bytes of files, but those of one request are taken if there are no others."""
        self._max_bytes = max_bytes
        self._files: dict[bytes, bytes] = {}
        self._users: dict[bytes, int] = {}
        """Requests that have each file."""
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def find(self, key: bytes) -> bytes | None:
        """Return the file of an image (`ImagePart.key`); None if no running request has it."""
        return self._files.get(key)

    def require_room(self, files: Mapping[bytes, bytes]) -> None:
        """Raise TooManyRequests if these files are too much beside those that are here."""
        new_bytes = sum([len(data) for key, data in files.items() if key not in self._files])
        if self.num_bytes and new_bytes and self.num_bytes + new_bytes > self._max_bytes:
            raise TooManyRequests(
                f"images of {self.num_bytes} bytes are of running requests and {new_bytes} more would pass the limit "
                f"of {self._max_bytes} (router.max_total_body_bytes); try again later"
            )

    def add(self, files: Mapping[bytes, bytes]) -> None:
        """Take the files of a request that begins."""
        for key, data in files.items():
            if key not in self._files:
                self._files[key] = data
                self.num_bytes += len(data)
            self._users[key] = self._users.get(key, 0) + 1

    def release(self, files: Mapping[bytes, bytes]) -> None:
        """Drop the files of a request that is over, unless others have them, too."""
        for key in files:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.num_bytes -= len(self._files.pop(key))
