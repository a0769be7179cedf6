import logging
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from svrl_jax.checkpoint import CheckpointError, Checkpoints

NOTES = {"data_position": {"row": 3}, "config": {"seed": 0}, "host": {"labels": "x"}}


def make_state(scale=1.0):
    params = {"w": scale * jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(7)}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.case("A-C3")
def test_state_and_data_position_come_back_together(tmp_path):
    rows = list(range(10))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(3, make_state(), data_position={"row": 3}, config={"a": 1}, host={"x": 2})
        restored = checkpoints.restore(make_state(0.0))
    assert_same(restored.state, make_state())
    assert (restored.step, restored.config, restored.host) == (3, {"a": 1}, {"x": 2})
    assert rows[restored.data_position["row"]] == 3  # the fourth row is next


def test_nothing_saved_restores_nothing(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.restore(make_state()) is None


@pytest.mark.case("A-C1")
@pytest.mark.parametrize("lost", ["commit_success.txt", "arrays", "host"])
def test_unfinished_step_is_ignored_and_can_be_saved_again(tmp_path, caplog, lost):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1800, make_state(1.0), **NOTES)
        checkpoints.save(1820, make_state(2.0), **NOTES)
        checkpoints.wait()
        gone = tmp_path / "1820" / lost
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        with caplog.at_level(logging.WARNING):
            restored = checkpoints.restore(make_state(0.0))
        assert "1820" in caplog.text and "unfinished" in caplog.text
        assert restored.step == 1800
        assert_same(restored.state, make_state(1.0))
        with pytest.raises(CheckpointError, match=r"1820 is unfinished .*1800"):
            checkpoints.restore(make_state(0.0), step=1820)
        checkpoints.save(1820, make_state(3.0), **NOTES)
        assert_same(checkpoints.restore(make_state(0.0)).state, make_state(3.0))


def test_temporary_folder_of_a_killed_save_is_no_checkpoint(tmp_path):
    (tmp_path / "12.orbax-checkpoint-tmp-99").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None


@pytest.mark.case("A-C2")
def test_save_survives_an_immediate_exit(tmp_path):
    program = f"""
        import jax.numpy as jnp
        from svrl_jax.checkpoint import Checkpoints
        checkpoints = Checkpoints({str(tmp_path)!r})
        state = {{"w": jnp.arange(4_000_000.0)}}
        checkpoints.save(5, state, data_position=1, config={{}}, host=None)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore({"w": jnp.zeros(4_000_000)})
    assert restored.step == 5
    np.testing.assert_array_equal(restored.state["w"], np.arange(4_000_000.0))


def test_donated_state_is_saved_as_it_was(tmp_path):
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = {"w": jnp.zeros(1_000_000)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, **NOTES)
        state = step(state)
        saved = checkpoints.restore({"w": jnp.ones(1_000_000)}).state["w"]
    assert float(state["w"][0]) == 1.0
    assert float(jnp.abs(saved).max()) == 0.0


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (2, 4, 10):
            checkpoints.save(step, {"w": jnp.float32(step)}, **NOTES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "4"]


def test_finished_step_is_not_overwritten(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.float32(1)}, **NOTES)
        with pytest.raises(CheckpointError, match="not overwritten"):
            checkpoints.save(1, {"w": jnp.float32(2)}, **NOTES)
        assert float(checkpoints.restore({"w": jnp.float32(0)}).state["w"]) == 1.0


def break_data(folder):
    for path in folder.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(b"broken")


def break_notes(folder):
    (folder / "host" / "metadata").write_text("{")


@pytest.mark.parametrize("damage", [break_data, break_notes])
def test_broken_folder_gives_one_sentence(tmp_path, damage):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(), **NOTES)
        checkpoints.wait()
        damage(tmp_path / "1")
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(make_state())
    message = str(caught.value)
    assert str(tmp_path / "1") in message and "another workdir" in message
    assert "\n" not in message


def test_another_model_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros((2, 3))}, **NOTES)
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoints.restore({"other": jnp.zeros((2, 3))})
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpoints.restore({"w": jnp.zeros((2, 4))})


@pytest.mark.case("A-C4")
def test_typed_random_keys_go_on_where_they_were(tmp_path):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    x = jnp.ones(32)
    graphdef, _ = nnx.split(dropout)
    dropout(x), dropout(x)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, nnx.state(dropout), **NOTES)
        abstract = jax.eval_shape(lambda: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
        again = nnx.merge(graphdef, checkpoints.restore(abstract).state)
    np.testing.assert_array_equal(again(x), dropout(x))
