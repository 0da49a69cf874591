"""Where a document came from, against lists of hosts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import numpy as np
import xxhash

from data_pipeline.errors import DataError
from data_pipeline.filters.config import UrlConfig
from data_pipeline.streams import open_bytes

_NOT_IN_WORD = re.compile(r"[^0-9a-z]+")


def url(address: object, config: UrlConfig) -> str | None:
    """Why a document from this address goes, or None."""
    if not isinstance(address, str) or not address:
        return None
    if config.block or config.blocklists:
        host = host_of(address)
        blocked = hosts(tuple(config.block), tuple(config.blocklists))
        if host and _contains(blocked, [_hash(name) for name in _with_parents(host)]):
            return "host"
    if config.block_words and not set(config.block_words).isdisjoint(_NOT_IN_WORD.split(address.lower())):
        return "word"
    return None


def host_of(address: str) -> str:
    """Lower-case host of an address, with or without its scheme; empty where there is none."""
    try:
        host = urlsplit(address if "://" in address else f"//{address.lstrip('/')}").hostname
    except ValueError:  # such as an unclosed [ of IPv6
        return ""
    return (host or "").rstrip(".")


def _with_parents(host: str) -> list[str]:
    """a.b.c -> a.b.c, b.c, c."""
    labels = host.split(".")
    return [".".join(labels[first:]) for first in range(len(labels))]


def _contains(blocked: np.ndarray, wanted: list[int]) -> bool:
    numbers = np.array(wanted, dtype=np.uint64)
    places = np.minimum(np.searchsorted(blocked, numbers), len(blocked) - 1)
    return bool(len(blocked)) and bool(np.any(blocked[places] == numbers))


def _hash(host: str) -> int:
    return xxhash.xxh3_64_intdigest(host.encode("utf-8", "surrogatepass"))


@functools.lru_cache(maxsize=4)
def hosts(block: tuple[str, ...], blocklists: tuple[str, ...]) -> np.ndarray:
    """uint64, ascending: a hash of each blocked host (8 bytes a host; lists of millions are usual). Raises DataError where a list
    can't be read or has something else in it."""
    numbers = [_hash(host.lower()) for host in block]
    for path in blocklists:
        numbers.extend(map(_hash, _listed(path)))
    return np.unique(np.array(numbers, dtype=np.uint64))


def _listed(path: str) -> Iterator[str]:
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            entry = line.split(b"#")[0].decode("utf-8", "replace").strip().lower()
            if not entry:
                continue
            host = entry.split()[-1]  # a hosts file has an address before it
            host = host.partition("://")[2].rstrip("/") if "://" in host else host.rstrip("/")
            if "/" in host:
                raise DataError(f"{path}:{number}: {entry!r} is a page; a blocklist has hosts, such as example.com, one a line")
            yield host
