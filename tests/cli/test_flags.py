"""Settings from flags over environment over defaults."""

import argparse
import re
import socket
from typing import Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from hybridtei.cli.flags import (
    RETIRED,
    add_flags,
    boolean_flags,
    from_flags,
    group_of,
    is_set,
    outdated,
)
from hybridtei.cli.serve import address
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, fields_of
from hybridtei.errors import UsageError

KINDS = (ModelConfig, EngineConfig, ServerConfig)


def parsed(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, KINDS)
    return vars(parser.parse_args(arguments))


def settings(kind, *arguments, **environment):
    return from_flags(kind, parsed(*arguments), environment)


def typed(kind, line):
    """The settings of a line as a shell has it: `PORT=81 --auto-truncate`."""
    words = line.split()
    variables = [word for word in words if "=" in word and not word.startswith("-")]
    flags = [word for word in words if word not in variables]
    return settings(kind, *flags, **dict(word.split("=", 1) for word in variables))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_given_is_the_defaults(kind):
    assert settings(kind) == kind()


@examples(max_examples=10)
@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_flag_wins_over_the_variable(flag, variable):
    given = {"MAX_BATCH_TOKENS": str(variable)}
    assert settings(EngineConfig, **given).max_batch_tokens == variable
    both = settings(EngineConfig, f"--max-batch-tokens={flag}", **given)
    assert both.max_batch_tokens == flag


def test_a_default_is_told_from_the_same_value_set_by_hand(monkeypatch):
    name = "max_concurrent_requests"
    assert not is_set(name, argparse.Namespace(**parsed()))
    assert is_set(name, argparse.Namespace(**parsed("--max-concurrent-requests", "512")))
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "512")
    assert is_set(name, argparse.Namespace(**parsed()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_its_flag_and_its_variable(kind):
    fields = list(fields_of(kind))
    assert fields
    for field, plain, _ in fields:
        text = "true" if plain is bool else "7"
        if get_origin(plain) is Literal:
            text = get_args(plain)[-1]
        # Seven is beyond its bounds
        if field.name == "memory_fraction":
            text = "0.5"
        by_flag = settings(kind, "--" + field.name.replace("_", "-"), text)
        assert by_flag == settings(kind, **{field.name.upper(): text})
        assert str(getattr(by_flag, field.name)).strip("(),'").lower() in (text, "7.0")


TEI_FLAGS = (
    "model_id revision tokenization_workers dtype served_model_name pooling max_concurrent_requests max_batch_tokens "
    "max_batch_requests max_client_batch_size auto_truncate default_prompt_name default_prompt dense_path hf_token "
    "hf_api_token uds_path disable_spans otlp_endpoint otlp_service_name prometheus_port hostname port "
    "huggingface_hub_cache payload_limit api_key json_output cors_allow_origin"
)


def test_teis_names_and_defaults():
    known = parsed()
    assert {*TEI_FLAGS.split()} <= set(known)
    defaults = msgspec.structs.asdict(EngineConfig()) | msgspec.structs.asdict(ServerConfig())
    of_tei = {
        "max_concurrent_requests": 512,
        "max_batch_tokens": 16384,
        "max_batch_requests": None,
        "auto_truncate": True,
        "max_client_batch_size": 32,
        "payload_limit": 2_000_000,
        "port": 3000,
        "hostname": "127.0.0.1",
        "uds_path": "/tmp/text-embeddings-inference-server",
        "otlp_service_name": "text-embeddings-inference.server",
        "otlp_endpoint": None,
        "json_output": False,
        "disable_spans": False,
        "api_key": None,
        "cors_allow_origin": (),
    }
    assert defaults | of_tei == defaults
    assert settings(ServerConfig, "-p", "81").port == 81


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", True),
        ("--auto-truncate=false", False),
        ("--auto-truncate false", False),
        ("AUTO_TRUNCATE=false --auto-truncate", True),
        ("AUTO_TRUNCATE=false", False),
    ],
)
def test_booleans_stand_bare_or_with_a_value(line, value):
    assert typed(EngineConfig, line).auto_truncate is value


def test_origins_repeat_as_flags_and_are_one_in_the_environment():
    flags = ("--cors-allow-origin", "http://a", "--cors-allow-origin=b")
    assert settings(ServerConfig, *flags).cors_allow_origin == ("http://a", "b")
    variable = settings(ServerConfig, CORS_ALLOW_ORIGIN="http://a,b")
    assert variable.cors_allow_origin == ("http://a,b",)


@pytest.mark.parametrize(
    ("kind", "line", "named"),
    [
        (ServerConfig, "PORT=", "PORT: invalid value ''"),
        (EngineConfig, "AUTO_TRUNCATE=yes", "AUTO_TRUNCATE: .*`true` or `false`"),
        (EngineConfig, "--auto-truncate=TRUE", "--auto-truncate: "),
        (EngineConfig, "--max-batch-tokens 0", "--max-batch-tokens: .*a whole number from 1"),
        (EngineConfig, "--max-batch-tokens many", "--max-batch-tokens: invalid value 'many'"),
        (EngineConfig, "--memory-fraction 0", "--memory-fraction: .*above 0 to 1"),
        (ServerConfig, "--port 65536", "--port: .*0 to 65,535"),
        (ServerConfig, "--drain-seconds=-1", "--drain-seconds: "),
        (ModelConfig, "--dtype int4", "--dtype: .*`float16` or `float32` or `bfloat16` or `int8`"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_it_was_given_under(kind, line, named):
    with pytest.raises(UsageError, match=f"^{named}"):
        typed(kind, line)


def test_an_empty_text_is_a_value():
    assert settings(EngineConfig, DEFAULT_PROMPT="").default_prompt == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--not-a-flag", "--not-a-flag"),
        ("--port", "--port"),
        ("--port 1 -p 1", "cannot be used multiple times"),
        ("--offline true --offline=true", "cannot be used multiple times"),
    ],
)
def test_a_flag_is_known_has_its_value_and_is_given_once(line, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(*line.split())
    assert message in capsys.readouterr().err


def test_the_boolean_flags_are_those_that_may_stand_bare():
    bare = {
        field.name
        for kind in KINDS
        for field in msgspec.structs.fields(kind)
        if isinstance(field.default, bool)
    }
    assert boolean_flags(*KINDS) == {
        f"--{name.replace('_', '-')}" for name in bare | {"engine_process"}
    }


def test_the_older_name_of_the_token():
    for arguments, environment, source in (
        (["--hf-api-token", "hf_x"], {}, "--hf-api-token"),
        ([], {"HF_API_TOKEN": "hf_x"}, "HF_API_TOKEN"),
    ):
        assert settings(ModelConfig, *arguments, **environment).hf_token == "hf_x"
        (warning,) = outdated(parsed(*arguments), environment)
        assert warning == f"{source} is deprecated: use --hf-token or HF_TOKEN"
    assert outdated(parsed("--hf-token", "hf_x"), {}) == []


@pytest.mark.parametrize("name", RETIRED)
def test_a_flag_or_variable_that_was_removed_is_refused_with_what_to_use(name):
    flag = f"--{name.replace('_', '-')}"
    for words, variables, source in (
        ([flag], {}, flag),
        ([flag, "http://old:8080"], {}, flag),
        ([], {name.upper(): "1"}, name.upper()),
    ):
        with pytest.raises(UsageError, match=re.escape(f"{source} was removed: {RETIRED[name]}")):
            settings(ModelConfig, *words, **variables)


@pytest.mark.parametrize(
    "line",
    ["--hf-token a-secret --hf-api-token a-secret", "HF_TOKEN=a-secret HF_API_TOKEN=a-secret"],
)
def test_a_token_under_two_names_is_refused_and_not_shown(line):
    with pytest.raises(UsageError, match="exclude each other") as refused:
        typed(ModelConfig, line)
    assert "a-secret" not in str(refused.value)


def test_every_field_is_told_and_stands_under_a_heading(capsys):
    for kind in KINDS:
        for field, _, meta in fields_of(kind):
            assert meta.description, field.name
            assert meta.description.endswith((".", "].")), field.name
            assert group_of(kind, meta)
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "hf-api-token" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "as_tei", "expected"),
    [
        ("", False, "127.0.0.1"),
        ("", True, "0.0.0.0"),
        ("--api-key s3cret", False, "0.0.0.0"),
        ("--api-key-file keys.txt", False, "0.0.0.0"),
        ("API_KEY=s3cret", False, "0.0.0.0"),
        ("--hostname ::1 --api-key s3cret", False, "::1"),
        ("HOSTNAME=0.0.0.0 --hostname 127.0.0.1", True, "127.0.0.1"),
        ("HOSTNAME=10.0.0.7", False, "10.0.0.7"),
        (f"HOSTNAME={socket.gethostname()}", False, "127.0.0.1"),
        (f"HOSTNAME={socket.gethostname()}", True, "0.0.0.0"),
        ("--hostname localhost", False, "127.0.0.1"),
    ],
)
def test_the_address_is_the_given_one_or_this_machine_unless_clients_need_a_key(
    line, as_tei, expected
):
    server = typed(ServerConfig, line)
    assert address(server, is_given="hostname" in line.lower(), as_tei=as_tei)[0] == expected


def test_a_containers_own_name_is_no_reason_for_a_warning(caplog):
    address(ServerConfig(hostname=socket.gethostname()), is_given=True, as_tei=False)
    assert not caplog.records
    address(ServerConfig(hostname="another-name"), is_given=True, as_tei=False)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["PORT", "GRPC_PORT", "PROMETHEUS_PORT"])
@pytest.mark.parametrize(
    "link", ["tcp://10.43.0.7:9090", "udp://10.43.0.7:53", "tcp://[fd00::7]:80"]
)
def test_a_link_to_a_service_of_kubernetes_is_no_port(name, link):
    field = name.lower()
    server = settings(ServerConfig, **{name: link})
    assert getattr(server, field) == getattr(ServerConfig(), field)
    (line,) = outdated(parsed(), {name: link})
    assert line.startswith(f"{name}={link} is ignored: Kubernetes sets it")
    flag = f"--{field.replace('_', '-')}"
    assert getattr(settings(ServerConfig, flag, "4000", **{name: link}), field) == 4000
    assert outdated(parsed(flag, "4000"), {name: link}) == []
