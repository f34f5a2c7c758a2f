"""Dependencies report nothing to their makers, because the package says so before any of them can
be imported."""

import json
import os
import sys

import pytest

from tests.ran import ran
from tests.server.live import ROOT

NAMES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED")
# Where one of these is set, ONNX Runtime is silent anyway
REPORTS_ONLY_ELSEWHERE = (
    "CI",
    "TF_BUILD",
    "GITHUB_ACTIONS",
)


def bare(home, **more):
    """An environment in which reports are sent unless somebody turns them off."""
    removed = (*NAMES, *REPORTS_ONLY_ELSEWHERE)
    ours = {name: value for name, value in os.environ.items() if name not in removed}
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "caches"), "PYTHONPATH": str(ROOT)}
    return {**ours, **places, **more}


def run(code, environment, *flags):
    command = [sys.executable, *flags, "-c", code]
    return ran(command, env=environment)


def device_ids(home):
    return [path for path in home.rglob("*") if "onnxruntime" in path.name]


def test_the_package_turns_them_off_unless_the_user_has_set_them(tmp_path):
    code = f"import hybridtei, json, onnxruntime, os; print(json.dumps([os.environ.get(name) for name in {NAMES}]))"
    done = run(code, bare(tmp_path))
    assert (json.loads(done.stdout), done.stderr, device_ids(tmp_path)) == (["1", "1", "0"], "", [])
    chosen = dict(zip(NAMES, ["0", "", "1"], strict=True))
    done = run(code.replace("onnxruntime, ", ""), bare(tmp_path, **chosen))
    assert json.loads(done.stdout) == [*chosen.values()]


@pytest.mark.skipif(sys.platform != "linux", reason="reports come from the wheel for Linux")
def test_one_that_imported_onnx_runtime_before_is_warned_once(tmp_path):
    done = run(
        "import onnxruntime\nimport hybridtei\nimport hybridtei.encoder",
        bare(tmp_path),
        "-W",
        "always",
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "RuntimeWarning" in line] == [
        "<string>:2: RuntimeWarning: onnxruntime was imported before hybridtei, so hybridtei cannot turn off "
        "onnxruntime's usage reports: import hybridtei first, or set ORT_DISABLE_TELEMETRY=1 in the environment"
    ]
    # So this test would see it if the others left one too
    assert device_ids(tmp_path) != []
    quiet = run(
        "import onnxruntime, hybridtei", bare(tmp_path, ORT_DISABLE_TELEMETRY="1"), "-W", "error"
    )
    assert (quiet.returncode, quiet.stderr) == (0, "")
