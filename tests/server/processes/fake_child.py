"""The engine's process over the fake backend. The word "duti" fails a pass, "dura" ends the lanes,
"dato" takes a while."""

import sys
import time

from conformance.small.fake_backend import FakeBackend
from hybridtei.inference.load import LoadedModel, find_model, text_model
from hybridtei.server import engine_child


def load(config, engine):
    spec = find_model(config)
    model = text_model(spec, engine)
    poison, murder, slow = (
        int(model.reader.read([word], truncate=True)[0].input_ids[1])
        for word in ("duti", "dura", "dato")
    )

    def gate(batch):
        if (batch.input_ids == murder).any():
            # No lane survives what is no Exception
            raise SystemExit("murder")
        time.sleep((batch.input_ids == slow).any() / 4)

    return LoadedModel(model, FakeBackend(spec, fail_on=poison, gate=gate), 32)


if __name__ == "__main__":
    engine_child.load_model = load
    engine_child.main(int(sys.argv[1]))
