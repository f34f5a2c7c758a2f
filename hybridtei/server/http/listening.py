"""A socket at an address that refuses connections until it listens, so that a port that is taken is told before any work."""

from __future__ import annotations

import ipaddress
import socket


def bound(hostname: str, port: int) -> socket.socket:
    """`hostname`: an IP address. Raises OSError, naming the address."""
    version = ipaddress.ip_address(hostname).version
    listening = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if version == 6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listening.bind((hostname, port))
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {hostname}:{port}: {error.strerror}") from error
    return listening
