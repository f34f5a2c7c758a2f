"""The command in this process."""

import pytest

from hybridtei.cli import main


@pytest.fixture
def said(capsys):
    """A function: what the command writes, which has to end with a status."""

    def run(*words, status=0):
        capsys.readouterr()
        assert main([*map(str, words)]) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def refused(capsys):
    """A function: what the command says of words that it does not take."""

    def run(*words):
        with pytest.raises(SystemExit, match="2"):
            main([*map(str, words)])
        return capsys.readouterr().err

    return run
