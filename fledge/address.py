"""Addresses of servers as users write them."""

from __future__ import annotations

from urllib.parse import urlsplit

ENDPOINTS = ("/chat/completions", "/completions", "/models")  # behind /v1


def root_of(url: str) -> str:
    """The address of a server without /v1 and what stands behind it. Raises ValueError for an address that is not http
    or https, or whose port is none."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets, and of a port
        usable = False
    if not usable:
        raise ValueError(f"{url} is not the address of a server; write it as http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ENDPOINTS:
        path = path.removesuffix(ending)
    return parts._replace(path=path.removesuffix("/v1"), query="", fragment="").geturl()
