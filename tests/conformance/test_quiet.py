"""`conformance/quiet`: what it reads in recorded lines of `strace`; and ONNX Runtime's reports,
which it sees."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.quiet_trace import CALLS, Finding, findings
from tests.server.live import HANG, ROOT

WORK, CACHE = Path("/tmp/w"), Path("/home/u/.cache/hybridtei")


def found(*lines):
    return list(findings([f"{line}\n" for line in lines], [WORK, CACHE], WORK))


def test_a_look_up_is_seen_by_its_packet_and_by_what_the_resolver_reads():
    assert found(
        '7598  openat(AT_FDCWD</tmp/w>, "/etc/hosts", O_RDONLY|O_CLOEXEC) = 8</etc/hosts>',
        '7597  10:37:48.6 connect(9, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.255.255.53")}, 16) = 0',
        "7597  connect(9<socket:[1]>, {sa_family=AF_INET6, sin6_port=htons(53), sin6_flowinfo=htonl(0), "
        'inet_pton(AF_INET6, "fd00::53", &sin6_addr), sin6_scope_id=0}, 28 <unfinished ...>',
    ) == [
        Finding("look-up", "/etc/hosts"),
        Finding("look-up", "10.255.255.53:53"),
        Finding("look-up", "fd00::53:53"),
    ]


def test_connections_and_packets():
    assert found(
        '1 connect(4, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("192.0.2.7")}, 16) = -1 EINPROGRESS (now)',
        '1 sendto(4, "x", 1, 0, {sa_family=AF_INET, sin_port=htons(9), sin_addr=inet_addr("192.0.2.8")}, 16) = 1',
        '1 connect(4, {sa_family=AF_UNIX, sun_path="/run/somebody"}, 110) = 0',
        '1 connect(4, {sa_family=AF_UNIX, sun_path="/tmp/w/tmp/hybridtei-0/engine.sock"}, 110) = 0',
        '1 connect(4, {sa_family=AF_UNIX, sun_path="/var/run/nscd/socket"}, 110) = -1 ENOENT (No such file or directory)',
        '1 sendto(4<TCP:[1]>, "answer", 6, MSG_NOSIGNAL, NULL, 0) = 6',
        "1 +++ exited with 0 +++",
    ) == [
        Finding("connection", "192.0.2.7:443"),
        Finding("connection", "192.0.2.8:9"),
        Finding("connection", "/run/somebody"),
    ]


def test_files_outside_the_named_folders():
    assert found(
        '1 openat(AT_FDCWD</tmp/w>, "/home/u/.cache/Microsoft/x.db", O_RDWR|O_CREAT|O_NOFOLLOW|O_CLOEXEC, 0644) = 3',
        '1 openat(6</home/u/.cache/Other>, "deviceid.tmp", O_WRONLY|O_CREAT|O_EXCL, 0600 <unfinished ...>',
        '1 openat(AT_FDCWD</tmp/w>, "../elsewhere", O_WRONLY|O_CREAT, 0600) = 4',
        '1 rename("/tmp/w/part", "/home/u/done") = 0',
        '1 mkdir("/home/u/.config", 0700) = 0',
    ) == [
        Finding("file", path)
        for path in (
            "/home/u/.cache/Microsoft/x.db",
            "/home/u/.cache/Other/deviceid.tmp",
            "/tmp/elsewhere",
            "/home/u/done",
            "/home/u/.config",
        )
    ]


def test_files_that_the_readme_names():
    assert not found(
        '1 openat(AT_FDCWD</tmp/w>, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3',
        '1 openat(AT_FDCWD</tmp/w>, "modes.svg", O_WRONLY|O_CREAT|O_TRUNC, 0644) = 3',
        '1 mkdir("qdrant/notes", 0777) = 0',
        '1 mkdir("/home/u/.cache", 0700) = 0',
        '1 rename("/home/u/.cache/hybridtei/a.part", "/home/u/.cache/hybridtei/a") = 0',
        '1 openat(AT_FDCWD</tmp/w>, "/dev/null", O_RDWR|O_CREAT, 0666) = 3',
    )


def traced(code, folder):
    """Of a process that loads ONNX Runtime and stays until its reports would be under way."""
    home, trace = folder / "home", folder / "trace"
    home.mkdir()
    unset = {"CI", "TF_BUILD", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    watch = ["strace", "-f", "-q", "-y", "-e", f"trace={CALLS}", "-o", str(trace)]
    subprocess.run(
        [*watch, sys.executable, "-c", f"{code}; import time; time.sleep(25)"],
        env=environment,
        cwd=folder,
        check=True,
        timeout=HANG,
    )
    return list(findings(trace.read_text(errors="replace").splitlines(), [], folder))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_reports_are_seen_where_they_are_sent_and_none_is_where_the_package_came_first(
    tmp_path,
):
    loud, quiet = tmp_path / "loud", tmp_path / "quiet"
    loud.mkdir()
    quiet.mkdir()
    seen = traced("import onnxruntime", loud)
    assert {"look-up", "file"} <= {finding.what for finding in seen}
    assert traced("import hybridtei, onnxruntime", quiet) == []
