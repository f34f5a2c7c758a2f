"""Names by which a stranger's page may be loaded are refused, all others pass."""

import pytest

from hybridtei.server.http.security import OtherHost, check_host

ALLOWED = {"search.example.org"}


def scope_of(host):
    return {"type": "http", "headers": [(b"host", host.encode())]}


@pytest.mark.parametrize(
    "host",
    [
        "localhost:3000",
        "gpu-box",
        "GPU-box:8080",
        "10.0.0.7:3000",
        "10.0.0.7",
        "[::1]:3000",
        "[::1]",
        "nas.local",
        "search.default.svc:80",
        "search.example.org:443",
    ],
)
def test_addresses_and_local_names_pass(host):
    check_host(scope_of(host), ALLOWED)


@pytest.mark.parametrize("host", ["evil.com", "evil.com:3000", "local.evil.com", "example.org"])
def test_a_public_name_is_refused_and_named(host):
    with pytest.raises(OtherHost, match=host.partition(":")[0]):
        check_host(scope_of(host), ALLOWED)
