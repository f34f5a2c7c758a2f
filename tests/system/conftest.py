"""The root logger, put back after a test that configures it."""

import logging

import pytest

from hybridtei.system import logs


@pytest.fixture
def root():
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    levels = {name: logging.getLogger(name).level for name in (*logs.NOISY, "hyper", "hybridtei")}
    record_facts = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = record_facts
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
