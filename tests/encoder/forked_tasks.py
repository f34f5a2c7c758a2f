"""Celery's application for `test_forks.py`. Its messages are files."""

import os

from celery import Celery

from tests.encoder import forked

FOLDER = os.environ["MESSAGES"]
app = Celery("forked", broker="filesystem://", backend=f"file://{FOLDER}")
app.conf.broker_transport_options = {
    "data_folder_in": FOLDER,
    "data_folder_out": FOLDER,
    "control_folder": FOLDER,
}
is_same = app.task(name="is_same")(forked.is_same)
