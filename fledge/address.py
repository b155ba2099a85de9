"""Addresses of servers as users write them."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import httpx2

ENDPOINTS = ("/chat/completions", "/completions", "/models")  # behind /v1


def root_of(url: str) -> str:
    """The address of a server without /v1 and what stands behind it. Raises ValueError for an address that is not http
    or https, whose port is none, or that `refuse_credentials` refuses."""
    refuse_credentials(url)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx2.URL(parts.geturl())
    except (ValueError, httpx2.InvalidURL):  # of brackets, of a port, and of the host's name
        usable = False
    if not usable:
        raise ValueError(f"{url} is not the address of a server; write it as http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ENDPOINTS:
        path = path.removesuffix(ending)
    return parts._replace(path=path.removesuffix("/v1")).geturl()


def refuse_credentials(url: str) -> None:
    """Raises ValueError, without quoting the address, if a user, password or key can be in it: records and messages
    name addresses."""
    if not {"@", "?", "#"}.isdisjoint(url):
        raise ValueError(
            "the address of a server must not have @, ? or #, behind which a user, password or key would be written "
            "into records and messages; give the address alone, such as http://localhost:8000, and the key in the "
            "environment variable of --api-key-env"
        )


def key_in(variable: str) -> str | None:
    """The API key in an environment variable; None if there is none. Raises ValueError, without quoting the key, for
    characters that no header can have."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"the environment variable {variable} is to hold an API key, but has characters that are not printable "
            "ASCII; set it to the key alone"
        )
    return key or None
