"""Without the modules and functions that Windows lacks, the library and the client run, and the
rest says what it needs."""

import sys
import textwrap

from tests.ran import ran

WITHOUT = """
    import os, sys

    for module in ("fcntl", "resource", "uvloop", "pwd", "grp", "termios"):
        sys.modules[module] = None
    for name in ("register_at_fork", "fork", "geteuid", "getuid", "sched_getaffinity",
                 "sched_setaffinity", "setpriority", "PRIO_PROCESS", "O_NOFOLLOW", "O_NONBLOCK",
                 "O_DIRECTORY", "O_CLOEXEC", "O_TMPFILE", "sysconf", "fchmod"):
        delattr(os, name)
    from hybridtei import Client, Encoder, Index, LoadError
    from hybridtei.cli import main

    encoder = Encoder.load(sys.argv[1])
    assert encoder.encode(["baka", "bulo"]).dense.shape[0] == 2
    assert len(Index(["baka"], encoder).search("baka")) == 1
    try:
        Client("http://127.0.0.1:1", patience_s=0).encode("baka")
    except ConnectionError:
        pass
    try:
        Index.open(".")
    except LoadError as error:
        print(error)
    print(main(["serve"]))
"""


def test_the_library_runs_and_the_rest_says_so(hybrid):
    done = ran([sys.executable, "-c", textwrap.dedent(WITHOUT), str(hybrid)])
    assert done.stdout.startswith("the embedded Qdrant engine needs Linux or macOS"), done.stderr
    assert done.stdout.endswith("\n1\n")
    assert "`hybridtei serve` needs Linux or macOS: on Windows use WSL" in done.stderr
