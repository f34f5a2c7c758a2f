"""The command, as a user runs it: statuses, messages, and one real server from flag to answer."""

import json
import os
import re
import socket
import subprocess
import sys

import httpx
import pytest

from hybridtei import __version__, errors
from hybridtei.cli import explicit_booleans, main, router, without_values
from tests.ran import ran
from tests.sampled import sampled
from tests.server.live import HANG, ROOT, process

KEY = "s3cret-key"
BAD = "one\n2026-01-01T00:00:00.000000Z ERROR forged: line"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    """No variable of the machine decides here."""
    names = "HOSTNAME PORT API_KEY MODEL_ID AUTO_TRUNCATE TASK HF_TOKEN PROMETHEUS_PORT"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)


def test_version(capsys):
    for flag in ("--version", "-V"):
        with pytest.raises(SystemExit, match="0"):
            main([flag])
        assert capsys.readouterr().out == f"hybridtei {__version__}\n"


def test_python_m_works_without_torch_in_the_way():
    code = "import sys, runpy; sys.argv = ['hybridtei', '--version']\ntry: runpy.run_module('hybridtei', run_name='__main__')\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = ran([sys.executable, "-c", code], check=True)
    assert done.stdout.splitlines() == [f"hybridtei {__version__}", "False"]


def test_a_model_begins_to_load_before_what_speaks_http_is_imported():
    code = "import sys, hybridtei.cli.serve, hybridtei.server.start; print({'litestar', 'uvicorn'} & set(sys.modules))"
    done = ran([sys.executable, "-c", code], check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "COMMAND"),
        ("nonsense", "nonsense"),
        # No abbreviations
        ("serve --max-batch-tok 5", "--max-batch-tok"),
        ("PROMETHEUS_PORT=tcp serve", "PROMETHEUS_PORT: invalid value"),
        ("DEFAULT_PROMPT_NAME=b serve --default-prompt a", "exclude each other"),
        ("tune --default-prompt a --default-prompt-name b", "exclude each other"),
        (
            "serve --models x.toml --model-id a",
            "--models and --model-id exclude each other",
        ),
        ("serve --model-id a --model-id b --only-tei-routes", "--only-tei-routes: "),
        (
            "SERVED_MODEL_NAME=x serve --models x.toml",
            "--served-model-name names a single model",
        ),
        (
            "serve --port 81 --prometheus-port 81",
            "--prometheus-port: 81 is already the port of --port",
        ),
        (
            "serve --otlp-endpoint user:secret@collector:4317",
            "--otlp-endpoint holds a user or password",
        ),
        ("embed in.txt", "--output"),
        ("explain Nonsense", "known: HybridTeiError, RequestError"),
        ("serch notes a", "hybridtei: error: there is no command 'serch'; did you mean search?"),
        (
            "search c q --port 1",
            "hybridtei search: error: unrecognized arguments: --port; --port is a flag of serve\n",
        ),
        ("serve --device cuda", "; --backend torch uses a GPU\n"),
        ("ask . q --limt 3", "; did you mean --limit?\n"),
    ],
)
def test_usage_errors_end_with_2_and_name_the_flag(line, named, monkeypatch, refused):
    words = line.split()
    while words and "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    error = refused(*words)
    assert named in error
    assert "secret" not in error


def test_a_key_that_no_header_can_carry(monkeypatch, refused):
    monkeypatch.setenv("API_KEY", "from-a-file\n")
    assert "--api-key: no header can carry this key" in refused("serve")


def failing(line):
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hybridtei", *line.split()]
    return ran(command, env=environment)


def message(told):
    """Of an error, without the line that says where its cause and cure are."""
    first, second = told.err.splitlines()
    assert second.startswith("Cause and cure: hybridtei explain ")
    return str(first)


def test_embed_writes_its_vectors_where_standard_error_is_closed(bert, tmp_path):
    """The number of a closed stream goes to the next file that is opened: what is said must not
    land in the vectors."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"body":"bake balo"}\n{"body":"bomo"}\n')
    line = f"embed {source} -o {target} --field body --outputs dense --model-id {bert}"
    words = [sys.executable, "-m", "hybridtei", *line.split()]
    command = ["sh", "-c", 'exec "$0" "$@" 2>&-', *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=HANG, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["text"], len(row["dense"])) for row in rows] == [("bake balo", 32), ("bomo", 32)]


def test_embed_looks_at_its_target_before_it_loads_a_model(tmp_path, said):
    target = tmp_path / "none" / "out.npz"
    for wrong, words in (
        (target, f"there is no folder {target.parent}"),
        (tmp_path / "out.csv", "should end in .jsonl"),
    ):
        told = said("embed", tmp_path / "in.txt", "-o", wrong, "--model-id", "./none", status=1)
        assert message(told).startswith(f"Error: {wrong}: {words}")


ROUTER = ["-c", "import sys; from hybridtei.cli import router; sys.exit(router())"]


@pytest.mark.parametrize("is_json", sampled([True, False], [False]))
def test_serve_from_flag_to_answer_and_back(shipped, is_json):
    """A real model in a real process: logs that parse and cannot be forged, the key in none of
    them, an orderly end."""
    program = ["-m", "hybridtei", "serve"] if is_json else ROUTER
    flags = [f"--json-output={str(is_json).lower()}", "--api-key", KEY, "--hostname", "not-an-ip"]
    environment = {"MAX_CLIENT_BATCH_SIZE": "3", "SERVED_MODEL_NAME": "tiny", "LOG_LEVEL": "debug"}
    environment |= {"HF_API_TOKEN": "hf_secretsecret", "PORT": "0", "PROMETHEUS_PORT": "0"}
    with process([*program, "--model-id", str(shipped), *flags], environment) as running:
        url = running.wait_ready().replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=HANG, trust_env=False
        ) as client:
            (item,) = client.post("/embed_hybrid", json={"inputs": "bake balo"}).json()
            assert set(item) == {"dense", "sparse", "multivector"}
            assert client.post("/embed", json={"inputs": "bake balo"}).json() == [item["dense"]]
            facts = client.get("/info").json()
            assert (facts["model_id"], facts["served_model_name"]) == (str(shipped), "tiny")
            assert facts["max_client_batch_size"] == 3
            assert client.post("/embed", json={"inputs": ["x"] * 4}).status_code == 422
            body = {"inputs": "x"}
            assert client.post("/embed", json=body | {"prompt_name": BAD}).status_code == 422
            wrong = {"authorization": f"bearer {KEY}", "x-key": KEY}
            refused = httpx.post(f"{url}/embed?key={KEY}", json=body, headers=wrong)
            assert refused.status_code == 401
            assert client.post("/embed", content=KEY.encode()).status_code == 415
            scraped = re.search(r"Serving metrics: [\d.]+:(\d+)", "".join(running.lines))
            exposed = httpx.get(f"http://127.0.0.1:{scraped[1]}/metrics")
            assert 'te_request_success{method="single"} 2' in exposed.text
            assert exposed.headers["content-type"] == "text/plain; charset=utf-8"
        running.terminate()
        assert running.wait() == 0
    output = "".join(running.lines + running.errors)
    assert KEY not in output
    assert "secretsecret" not in output
    assert 'api_key: "[hidden]"' in output.replace('\\"', '"')
    assert str(shipped) not in running.lines[0]
    if not is_json:
        text_logs_are_well(running.lines)
        return
    entries = [json.loads(line) for line in running.lines]
    assert all({"timestamp", "level", "message", "target"} <= set(entry) for entry in entries)
    messages = [entry["message"] for entry in entries]
    assert any(BAD in message for message in messages)
    assert any("not-an-ip" in message for message in messages)
    assert any(message.startswith("outputs  dense, multivector, sparse") for message in messages)
    assert messages[0].startswith('Args { model_id: "')
    assert "HF_API_TOKEN is deprecated: use --hf-token or HF_TOKEN" in messages
    (failed,) = [entry for entry in entries if BAD in entry["message"]]
    assert (failed["level"], failed["span"]) == ("ERROR", {"name": "embed"})


PORTS = ("Starting HTTP server", "Starting gRPC server", "Serving metrics")


def test_a_log_of_objects_has_the_facts_of_each_line_at_start(shipped):
    """And where no key is set, all ports are this machine's alone, also in a container, whose
    HOSTNAME is a name."""
    line = f"-m hybridtei serve --model-id {shipped} --log-format json --port 0 --grpc-port 0"
    environment = {"HOSTNAME": "3f2a9c0d71be", "PROMETHEUS_PORT": "0"}
    with process(line.split(), environment) as running:
        port = int(running.wait_ready().rpartition(":")[2])
        running.terminate()
        assert running.wait() == 0
    entries = [json.loads(line) for line in running.lines]
    assert not entries[0]["message"].startswith("Args {")
    facts = {name: value for entry in entries for name, value in entry.get("facts", {}).items()}
    assert (facts["outputs"], facts["port"]) == (["dense", "multivector", "sparse", "tokens"], port)
    assert (facts["address"], facts["host"]) == ("127.0.0.1", "127.0.0.1")
    messages = [entry["message"] for entry in entries]
    for what in PORTS:
        assert sum(line.startswith(f"{what}: 127.0.0.1:") for line in messages) == 1
    names = "model_type dense_width backend dtype lanes max_input_length pass_tokens host"
    assert set(names.split()) <= set(facts)


LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z (ERROR| WARN| INFO|DEBUG) (\S.*: )?[\w.]+: \w+\.py:\d+: .*\n"
)


def text_logs_are_well(lines):
    assert all(LINE.fullmatch(line) for line in lines)
    assert " INFO hybridtei: serve.py:" in lines[0]
    assert ": Args { model_id: " in lines[0]
    assert any(
        "ERROR embed: hybridtei.server.routing: routing.py:" in line and r"one\n2026" in line
        for line in lines
    )


def test_a_taken_port_is_an_error_and_one_of_metrics_before_anything_is_loaded(shipped):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        here = "serve --hostname 127.0.0.1 --model-id"
        done = failing(f"{here} {shipped} --port {port}")
        of_metrics = failing(f"{here} ./none --prometheus-port {port}")
    assert done.returncode == 1
    told = f"Error: cannot listen on 127.0.0.1:{port}"
    assert told in done.stderr
    assert (of_metrics.returncode, of_metrics.stderr) == (
        1,
        f"{told}: Address already in use; choose another port\n",
    )


def test_a_bare_flag_leaves_the_next_word_alone(tmp_path, said):
    files = [tmp_path / "none.txt", "-o", tmp_path / "x.npz"]
    told = said("embed", "--offline", *files, "--model-id", "./none", status=1)
    assert message(told) == "Error: ./none: no such folder"


def test_the_router_takes_teis_flags_without_a_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        router(["--version"])
    assert capsys.readouterr().out == f"text-embeddings-router {__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        router(["--model-id", "x", "--prot", "80"])
    assert "unrecognized arguments: --prot; did you mean --port?\n" in capsys.readouterr().err
    assert router(["--model-id", "./none", "--offline"]) == 1
    assert message(capsys.readouterr()) == "Error: ./none: no such folder"


def test_the_embedded_models_name_on_the_hub_is_known(tmp_path, monkeypatch, said):
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path))
    model = "sentence-transformers/all-MiniLM-L6-v2"
    told = said("serve", "--model-id", model, "--offline", status=1)
    assert "; minilm-hybrid is embedded, with the same dense vectors" in message(told)


def test_flags_are_spelt_with_either_dash():
    given = ["--model_id=a_b", "--auto_truncate", "--served_model_name", "c_d", "--api-key=--e_f"]
    assert explicit_booleans(given) == [
        "--model-id=a_b",
        "--auto-truncate=true",
        "--served-model-name",
        "c_d",
        "--api-key=--e_f",
    ]


def test_a_misspelt_flag_does_not_show_what_it_was_to_hold(capsys):
    for arguments in (["--api-kye", KEY], [f"--api-kye={KEY}"]):
        with pytest.raises(SystemExit, match="2"):
            main(["serve", *arguments])
        shown = capsys.readouterr()
        assert "unrecognized arguments: --api-kye" in shown.err
        assert KEY not in shown.out + shown.err
    assert without_values(["word"]) == ["word"]


def test_traces_without_their_extra_are_refused_in_one_line(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    monkeypatch.setattr("hybridtei.system.logs.configure", lambda **_: None)
    flags = ["--otlp-endpoint", "http://127.0.0.1:1", "--model-id", "./none"]
    assert message(said("serve", *flags, status=1)).startswith(
        "Error: --otlp-endpoint needs an extra that is not installed: pip install 'hybridtei[otlp]'"
    )


def test_what_fails_at_start_ends_with_1_and_two_lines_and_does_not_show_the_key(bert):
    for flags, message in (
        ("--default-prompt-name b", "`default-prompt-name` is set to `b`"),
        (
            "--max-batch-tokens 5 --auto-truncate=false --json-output",
            "`max-batch-tokens` (5)",
        ),
    ):
        done = failing(f"serve --model-id {bert} --port 0 --api-key {KEY} {flags}")
        assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr
        assert done.stderr.startswith("Error: ")
        assert message in done.stderr
        # People read five lines, machines all settings
        assert ("Args { " in done.stdout) == ("--json-output" in flags)
        assert KEY not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@127.0.0.1:1",
        "user:secret@127.0.0.1:1",
        "http://user:secret@127.0.0.1:port",
        "ftp://user:secret@127.0.0.1",
        "http://user:secret@127.0.0.1:1,,http://b",
        "http://127.0.0.1:1?key=secret",
    ],
)
def test_what_fails_at_start_does_not_show_a_password_of_a_url(bert, url):
    done = failing(f"serve --model-id {bert} --log-level debug --qdrant-url {url}")
    assert done.returncode == 1, done.stderr
    assert "`qdrant_url`" in done.stderr
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("Error: fp8 needs a GPU of compute capability 8.9 or later, not cpu", "LoadError"),
        ("http://a/embed: no answer within 10 s (patience_s), 9 tries; the last: 503", "NoAnswer"),
        ("401: no API key or an unknown one: send the header", "NoKey"),
        ("x/y: not a local folder, not in the hub cache, and the hub is away", "MissingArtifact"),
        ("Model is overloaded", "Overloaded"),
        ("there is no collection nosuch in embedded Qdrant in ./qdrant", "UnknownCollection"),
        ("status 429", "Overloaded"),
        ("--grpc-port needs an extra: pip install 'hybridtei[grpc]'", "LoadError"),
    ],
)
def test_explain_finds_an_error_by_its_message(message, name, said):
    assert said("explain", *message.split()).out.splitlines()[0] == name


@pytest.mark.parametrize(
    "name",
    [
        kind.__name__
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ],
)
def test_explain_prints_the_cause_and_cure_of_each_error(name, said):
    """A file's address in a container is of no use outside of it."""
    first, blank, *told = said("explain", name.lower()).out.splitlines()
    assert (first, blank) == (name, "")
    assert len(" ".join(told)) > 20
    assert not re.search(r"</?(p|code|em)>|&\w+;", "".join(told))
