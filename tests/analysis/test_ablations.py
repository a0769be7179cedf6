"""Tables over configs and seeds, and the section of a README that they fill."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from configs import ablations as config
from svrl_jax.analysis import ablations
from svrl_jax.evals import stats
from svrl_jax.evals.cases import rows_of
from tests.evals.twelve import twelve, write_run

ROWS = rows_of(twelve())


def run(word, seed, right):
    """The twelve with the first `right` scored ones right, under both modes."""
    scored = [i for i, r in enumerate(ROWS) if r.is_right is not None]
    rows = [
        dataclasses.replace(r, is_right=i in scored[:right]) if i in scored else r
        for i, r in enumerate(ROWS)
    ]
    return ablations.SweepRun(word, seed, {"sampled": rows, "greedy": rows}, {"seconds": 60.0})


RUNS = [run("full", 0, 6), run("full", 1, 8), run("outcome_only", 0, 3), run("outcome_only", 1, 5)]


def test_means_and_spreads_are_over_seeds():
    block = ablations.means(RUNS, "sampled")
    assert block.columns[:4] == ("reward", "seeds", "Acc", "SR")
    spread = np.std([6 / 11, 8 / 11], ddof=1)
    assert block.rows[0][:3] == ("full", "2", f"{7 / 11:.3f} ± {spread:.3f}")
    assert ablations.means(RUNS[:1], "greedy").rows[0][2] == f"{6 / 11:.3f}"  # no spread of one


def test_differences_are_paired_by_seed_and_question():
    block = ablations.differences(RUNS, "sampled", "full")
    ((word, acc, sr, *_),) = block.rows
    assert word == "outcome_only" and acc.startswith(f"{-3 / 11:+.3f} [") and acc.endswith("!")
    assert sr == "+0.000 [+0.000, +0.000]"
    assert ablations.differences(RUNS[:3], "sampled", "outcome_only").rows[0][0] == "full"
    lonely = [RUNS[0], dataclasses.replace(RUNS[2], seed=7)]
    assert ablations.differences(lonely, "sampled", "full").rows[0][1] == "-"  # no common seed


def test_everything_is_written(tmp_path):
    written = ablations.write(RUNS, tmp_path, "the command", ("full", "outcome_only", "none"))
    assert len(written) == 6  # two modes x (means, two references)
    text = (tmp_path / "ablations.md").read_text()
    assert text.startswith("the command") and text.count("|---") == 6
    assert np.asarray(Image.open(tmp_path / "ablations.png").convert("L")).std() > 5
    assert (tmp_path / "ablations_t_1.csv").is_file() and (tmp_path / "ablations.svg").is_file()


def test_a_readme_gets_its_section_and_keeps_the_rest(tmp_path):
    readme = tmp_path / "README.md"
    marks = "<!-- ablations: begin -->{}<!-- ablations: end -->"
    readme.write_text("before\n" + marks.format("\nold\n") + "\nafter \\1\n")
    ablations.put_into(readme, "new \\g<0> text")
    assert readme.read_text() == (
        "before\n" + marks.format("\n\nnew \\g<0> text\n\n") + "\nafter \\1\n"
    )
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(ablations.ReadmeError, match="needs the lines"):
        ablations.put_into(tmp_path / "bare.md", "x")


def test_the_trained_policys_rows_are_read(tmp_path):
    folder = write_run(tmp_path / "run")
    found = ablations.read(folder, "full", 0, {})
    assert set(found.rows) == {"greedy"}
    assert stats.figures(found.rows["greedy"])["acc"] == pytest.approx(6 / 11)


def test_each_word_changes_the_reward_alone():
    full = config.get_config("full").to_dict()
    for word, changes in config.CHANGES.items():
        other = config.get_config(word).to_dict()
        assert {k for k in full["reward"] if full["reward"][k] != other["reward"][k]} == set(
            changes
        )
        assert {k: v for k, v in other.items() if k != "reward"} == {
            k: v for k, v in full.items() if k != "reward"
        }
    assert not any(config.get_config("outcome_only").reward[k] for k in config._FACTORS)
