"""The suite of checkpoints: what it judges right, wrong and clear, on cases of its own."""

from dataclasses import replace

from conformance.checkpoints import judge
from conformance.checkpoints.__main__ import CASES, faults_of, run
from conformance.checkpoints.build import config, edit
from conformance.checkpoints.sample import COMPILED, KNOWN, SAMPLE


def verdicts(name, scratch, **changes):
    return [row["verdict"] for row in run(name, replace(CASES[name], **changes), scratch, ["ort"])]


def test_an_oracle_of_another_pooling_is_a_wrong_answer(tmp_path):
    other = (
        edit("1_Pooling/config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False),
    )
    assert verdicts("fam-bert", tmp_path, oracle=other) == [judge.WRONG]
    assert verdicts("fam-bert", tmp_path / "named", oracle=other, by_design="a reason") == [
        judge.BY_DESIGN
    ]


def test_what_cannot_be_built_or_judged_is_told(tmp_path):
    assert verdicts("fam-bert", tmp_path / "built", settings={"num_attention_heads": 5}) == [
        "could not be built"
    ]
    assert verdicts("fam-bert", tmp_path / "judged", oracle=(config(model_type="other"),)) == [
        judge.NOT_JUDGED
    ]


def test_the_list_of_known_faults_only_shrinks():
    def row(case, verdict):
        return {"case": case, "backend": "ort", "verdict": verdict, "deviation": "1", "message": ""}

    known = {("listed", "ort"): "a reason"}
    assert faults_of([row("listed", judge.WRONG), row("right", judge.RIGHT)], known) == []
    assert len(faults_of([row("new", judge.WRONG)], known)) == 1
    assert "remove it" in faults_of([row("listed", judge.RIGHT)], known)[0]
    assert len(faults_of([row("broken", "could not be built")], known)) == 1


def test_the_sample_names_cases_of_every_kind():
    assert set(COMPILED) <= set(SAMPLE) <= set(CASES)
    assert {CASES[name].kind for name in SAMPLE} == {case.kind for case in CASES.values()}
    assert {case for case, _ in KNOWN} <= set(CASES)
