"""Processes that Ray started for this one, found by the names it gives them, to be killed."""

import psutil


def named(part):
    """Those whose title holds `part`, by process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if part in " ".join(process.cmdline()):
                found[process.pid] = process
        except psutil.Error:
            continue
    return found
