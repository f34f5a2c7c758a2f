"""The suite of checkpoints: what it judges right, wrong and clear, on cases of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.checkpoints import judge
from conformance.checkpoints.__main__ import CASES, faults_of, main, run
from conformance.checkpoints.build import config, edit
from conformance.checkpoints.sample import COMPILED, KNOWN, SAMPLE
from hybridtei.errors import LoadError, MissingArtifact, WeightMismatch


def verdicts(name: str, scratch: Path, **changes: object) -> list[str]:
    return [row["verdict"] for row in run(name, replace(CASES[name], **changes), scratch, ["ort"])]


@pytest.mark.parametrize(
    "name", ["fam-bert", "ce-modernbert", "splade-plain-distilbert", "tag-bert", "cls3-gte"]
)
def test_a_plain_checkpoint_is_served_right(tmp_path: Path, name: str) -> None:
    assert verdicts(name, tmp_path) == [judge.RIGHT]


def test_an_oracle_of_another_pooling_is_a_wrong_answer(tmp_path: Path) -> None:
    other = (
        edit("1_Pooling/config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False),
    )
    assert verdicts("fam-bert", tmp_path, oracle=other) == [judge.WRONG]
    assert verdicts("fam-bert", tmp_path / "named", oracle=other, by_design="a reason") == [
        judge.BY_DESIGN
    ]


def test_what_cannot_be_built_or_judged_is_told(tmp_path: Path) -> None:
    assert verdicts("fam-bert", tmp_path / "built", settings={"num_attention_heads": 5}) == [
        "could not be built"
    ]
    assert verdicts("fam-bert", tmp_path / "judged", oracle=(config(model_type="other"),)) == [
        judge.NOT_JUDGED
    ]


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (
            LoadError("/x/config.json: `rope_type` is 'dynamic'; supported: 'default', 'linear'"),
            True,
        ),
        (
            MissingArtifact(
                "/x/adapter_config.json: `use_dora` is True; merge it into /x/base and save that"
            ),
            True,
        ),
        (WeightMismatch("/x: the weights lack `classifier.weight`"), True),
        (LoadError("/x/config.json: lacks `hidden_size`"), False),
        (LoadError("the model is not served"), False),
        (
            LoadError(
                "/x/model.bin: cannot be read: PytorchStreamReader failed reading zip archive"
            ),
            False,
        ),
        (KeyError("`hidden_size` should be there"), False),
    ],
)
def test_a_clear_refusal_names_the_key_and_the_cure(
    tmp_path: Path, error: Exception, clear: bool
) -> None:
    assert judge.is_clear(error, tmp_path) is clear


def test_it_resumes_and_prints_its_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.tsv"
    options = ["--only", "cfg-bert-eps,cfg-bert-act-mish", "--engines", "ort", "--out", str(out)]
    assert main(options) == main(options) == 0
    assert len(out.read_text().splitlines()) == 3
    printed = capsys.readouterr().out
    assert printed.count("served and right: 50.0% (expected >= 70 %)") == 2
    assert printed.count("served and wrong: 0 (expected 0)") == 2


def test_the_list_of_known_faults_only_shrinks() -> None:
    def row(case: str, verdict: str) -> dict[str, str]:
        return {"case": case, "backend": "ort", "verdict": verdict, "deviation": "1", "message": ""}

    known = {("listed", "ort"): "a reason"}
    assert faults_of([row("listed", judge.WRONG), row("right", judge.RIGHT)], known) == []
    assert len(faults_of([row("new", judge.WRONG)], known)) == 1
    assert "remove it" in faults_of([row("listed", judge.RIGHT)], known)[0]
    assert len(faults_of([row("broken", "could not be built")], known)) == 1


def test_the_sample_names_cases_of_every_kind() -> None:
    assert set(COMPILED) <= set(SAMPLE) <= set(CASES)
    assert {CASES[name].kind for name in SAMPLE} == {case.kind for case in CASES.values()}
    assert {case for case, _ in KNOWN} <= set(CASES)


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--engines", "ort,none"])
