"""TEI's GELU: the tanh form, whatever the checkpoint says.

TEI computes `gelu` by its tanh approximation, so vectors that it stored differ from the checkpoint's own by about 1e-3. Who
has an index full of them asks for the same form here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridtei.checkpoint.classifiers import LinearStep
from hybridtei.checkpoint.spec import ModelSpec

EXACT, TANH = "gelu", "gelu_pytorch_tanh"
SETTINGS = ("hidden_act", "hidden_activation", "activation", "activation_function", "classifier_activation")


def with_tanh_gelu(spec: ModelSpec) -> ModelSpec:
    """The same model with the tanh form wherever it had the exact one: in its trunk, and in the head on top."""
    head = spec.classifier
    if head is not None:
        steps = tuple(
            replace(step, activation=TANH) if isinstance(step, LinearStep) and step.activation == EXACT else step
            for step in head.steps
        )
        head = replace(head, steps=steps)
    return replace(spec, tanh_gelu=True, classifier=head)


def in_config(config: Any) -> None:
    """The same said to transformers, in its configuration object."""
    for name in SETTINGS:
        if getattr(config, name, None) == EXACT:
            setattr(config, name, TANH)
