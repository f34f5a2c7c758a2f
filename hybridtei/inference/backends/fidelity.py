"""Compares an approximation of a model with its exact form by the vectors of sample texts.

Texts to judge an approximation by: short and long, prose, questions, code, several languages, several on one matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridtei.batch import Encoding, Head, pack
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import Backend
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.tokenizer import Tokenizer
from hybridtei.outputs import Floats

SAMPLE = (
    "What is the capital of France?",
    "Paris is the capital and largest city of France.",
    "The Eiffel Tower was completed in 1889 for the World's Fair.",
    "Berlin is the capital of Germany.",
    "How do I bake sourdough bread at home?",
    "Mix flour, water and salt with a lively starter, let the dough rest overnight, shape it and bake it in a hot pot.",
    "A banana bread recipe needs ripe bananas, eggs, flour and sugar.",
    "Yeast ferments sugars into carbon dioxide and ethanol.",
    "python list comprehension syntax",
    "def add(a, b):\n    return a + b",
    "SELECT name, COUNT(*) FROM orders GROUP BY name HAVING COUNT(*) > 5;",
    "A database index speeds up reads at the cost of slower writes and additional storage.",
    "Vector search finds the nearest neighbours of an embedding, while keyword search matches words.",
    "Hybrid retrieval combines lexical and semantic scores, for instance by reciprocal rank fusion.",
    "BM25 ranks documents by term frequency, inverse document frequency and document length.",
    "The mitochondria is the powerhouse of the cell.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Symptoms of influenza include fever, cough, sore throat, muscle aches and fatigue.",
    "Take two tablets daily with food; do not exceed the recommended dose.",
    "Is it safe to take ibuprofen and paracetamol together?",
    "The court held that the contract was void because consent had been obtained by fraud.",
    "The tenant shall give three months' written notice before terminating the lease.",
    "Interest rates were raised by a quarter of a percentage point to slow inflation.",
    "The company reported quarterly revenue of 4.2 billion dollars, up 8% from a year earlier.",
    "Shares fell sharply after the announcement.",
    "Bitcoin is a decentralised digital currency without a central bank.",
    "The home team won 3-1 after two late goals.",
    "She set a new world record in the 400 metres hurdles.",
    "Chess openings such as the Sicilian Defence lead to sharp positions.",
    "The orchestra played Beethoven's Ninth Symphony to a full house.",
    "He tuned his guitar and sang an old folk song about the sea.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "Call me Ishmael.",
    "Dogs are loyal companions; cats prefer their independence.",
    "A cat sat on the mat.",
    "A kitten is sleeping on the carpet.",
    "The volcano erupted without warning, and ash covered the villages around it.",
    "Heavy rain is expected in the north, with sunny spells in the south.",
    "Global average temperatures have risen by more than one degree since the nineteenth century.",
    "Solar panels convert sunlight into electricity with an efficiency of about twenty percent.",
    "Electric cars need charging stations; petrol cars need fuel.",
    "The train to Edinburgh leaves from platform four at 9:15.",
    "Cheap flights from New York to Tokyo in November",
    "Where can I renew my passport?",
    "Passport renewals are handled by post or at the consulate; bring two photographs and the old passport.",
    "My order arrived damaged and I would like a refund.",
    "Thank you for contacting support. Your ticket has been received and we will reply within two working days.",
    "Reset your password by clicking the link in the message we sent you.",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "Segmentation fault (core dumped)",
    "To install the package, run the installer, accept the licence and restart the machine when asked to.",
    "Neural networks are trained by gradient descent on a loss function. The gradient is computed by backpropagation, which "
    "applies the chain rule from the output layer back to the input layer. Large models need large amounts of data and "
    "compute, and their weights are often stored in sixteen or eight bits so that they fit into memory and run faster.",
    "The Roman Empire reached its greatest extent under Trajan. Roads, aqueducts and a common law held together provinces "
    "from Britain to Mesopotamia; trade flourished, cities grew, and Latin became the language of administration. Over the "
    "following centuries, civil wars, plague and pressure at the borders weakened the state until it was divided in two.",
    "Water boils at 100 degrees Celsius at sea level.",
    "E = mc^2",
    "The derivative of sin(x) is cos(x).",
    "Wo ist der nächste Bahnhof?",
    "Der Zug nach München fährt heute von Gleis sieben ab.",
    "¿Cuál es la capital de España?",
    "Madrid es la capital de España y su ciudad más poblada.",
    "Où puis-je acheter du pain frais ?",
    "東京は日本の首都です。",
    "北京是中国的首都。",
    "Сколько стоит билет до Москвы?",
    "ok",
    "12345",
)

NEIGHBOURS = 10
SAMPLE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Guard:
    """The least fidelity of an approximation: worst and mean cosine of the sample texts' vectors, and `overlap`."""

    worst: float = 0.97
    mean: float = 0.99
    overlap: float = 0.0

    def __str__(self) -> str:
        asked = f"{self.worst} at worst, {self.mean} on average"
        return f"{asked}, {self.overlap:.0%} of neighbours" if self.overlap else asked


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The measured fidelity. `overlap`: the share of each text's nearest neighbours that stay the same."""

    worst: float
    mean: float
    overlap: float

    def passes(self, guard: Guard) -> bool:
        return self.worst >= guard.worst and self.mean >= guard.mean and self.overlap >= guard.overlap

    def __str__(self) -> str:
        return f"cosine {self.worst:.4f} at worst, {self.mean:.4f} on average; {self.overlap:.1%} of neighbours kept"


def compare(exact: Backend, approximate: Backend) -> Fidelity:
    """Measure the fidelity of one backend to another one of the same model."""
    return fidelity(sample_vectors(approximate), sample_vectors(exact))


def check(found: Fidelity, guard: Guard, spec: ModelSpec, what: str) -> None:
    """Raises LoadError with the figures, beginning with `what`, if an approximation is too far off."""
    if not found.passes(guard):
        raise LoadError(f"{spec.folder}: {what} for this model: {found}; asked for: {guard}")


def fidelity(ours: Floats, theirs: Floats) -> Fidelity:
    """The fidelity of unit vectors float32[n, d] to the exact ones."""
    cosines = (ours * theirs).sum(1)
    found, expected = _neighbours(ours), _neighbours(theirs)
    kept = [len(set(one) & set(other)) / len(one) for one, other in zip(found, expected, strict=True)]
    return Fidelity(float(cosines.min()), float(cosines.mean()), float(np.mean(kept)))


def sample_vectors(backend: Backend) -> Floats:
    """Unit vectors float32[n, d] of the sample texts, each embedded alone."""
    spec = backend.spec
    head = Head.SPARSE if spec.is_splade else Head.DENSE
    outputs = [backend.forward(pack([one], frozenset({head}), spec.positions)) for one in sample_encodings(spec)]
    rows = [one.dense if one.splade is None else one.splade.to_dense() for one in outputs]
    vectors = np.concatenate([row for row in rows if row is not None])
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)))


def sample_encodings(spec: ModelSpec, texts: Sequence[str] = SAMPLE) -> list[Encoding]:
    """The encodings of the sample texts. They cycle through the model's adapters."""
    settings = spec.tokenizer_settings
    tokenizer = Tokenizer.load(spec.folder / "tokenizer.json", has_token_types=spec.has_token_types, settings=settings)
    longest = min(spec.max_input_length, SAMPLE_TOKENS)
    encodings = [tokenizer.cut(raw, longest, "right") for raw in tokenizer.encode(texts)]
    choices = 1 if spec.adapters is None else 1 + len(spec.adapters.names)
    return [replace(encoding, adapter=i % choices) for i, encoding in enumerate(encodings) if len(encoding)]


def _neighbours(vectors: Floats) -> list[list[int]]:
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    nearest: list[list[int]] = np.argsort(-similarity, axis=1)[:, : min(NEIGHBOURS, len(vectors) - 1)].tolist()
    return nearest
