"""Runs that train adapters: what moves and what does not, what is saved, and that what comes out is an ordinary model."""

import dataclasses
import shutil
import warnings

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from test_train import miniature, steady

from jax_ppo import config as configs
from jax_ppo import evaluate, sharding, train
from jax_ppo.models import hf
from jax_ppo.runtime import checkpoint


def adapted(iterations, **sections):
    """The miniature with adapters on two projections, and a warm start that they stand on."""
    values = configs.to_dict(miniature(iterations=iterations))
    values["model"]["lora"] = {"rank": 4, "alpha": 8.0, "targets": "q_proj,down_proj"}
    for name, keys in sections.items():
        values[name] |= keys
    return configs.resolve(values)


def trained(workdir, item):
    """Parameters of the newest checkpoint as they were saved, by name."""
    step = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())
    with warnings.catch_warnings(action="ignore"):  # the mesh is the one it was saved on
        tree = checkpoint.ocp.PyTreeCheckpointer().restore((workdir / "checkpoints" / str(step) / item).absolute())
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree["params"])}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("adapted")
    train.run(adapted(2), workdir)
    return workdir


@pytest.mark.slow
def test_only_adapters_and_the_critics_head_are_trained_and_saved(straight):
    first, last = steady(straight)[1:]
    assert first["actor/reward_kl_penalty"] == 0.0 != last["actor/reward_kl_penalty"]
    assert max(line["training/first_ratio_dev_max"] for line in (first, last)) <= 1e-5
    assert max(line["training/rollout_probs_diff_max"] for line in (first, last)) <= 1e-5
    actor, critic = trained(straight, "actor"), trained(straight, "critic")
    kinds = {f"['model']['layers']['{m}']['lora_{k}']" for m in ("self_attn']['q_proj", "mlp']['down_proj") for k in "ab"}
    assert actor.keys() == kinds
    assert critic.keys() == kinds | {"['score']['kernel']"}
    for params in (actor, critic):
        assert all(np.any(x != 0) for x in params.values())  # every second matrix and the head start at zero


@pytest.mark.slow
def test_a_stop_changes_no_number(straight, tmp_path):
    """Nothing but the workdir is needed: the frozen weights are those of WORKDIR/model."""
    for iterations in (1, 2):
        train.run(adapted(iterations), tmp_path)
        shutil.rmtree(tmp_path / "builtin", ignore_errors=True)
    extra = lambda line: {k: v for k, v in line.items() if not k.startswith("val-")}  # noqa: E731
    assert [extra(line) for line in steady(tmp_path)] == [extra(line) for line in steady(straight)]
    for item in ("actor", "critic"):
        jax.tree.map(np.testing.assert_array_equal, trained(tmp_path, item), trained(straight, item))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["actor", "critic"])
def test_an_export_is_the_merged_model(straight, tmp_path, convert, which):
    head = {"actor": "lm_head", "critic": "score"}[which]
    convert.export_model(straight, tmp_path / "export", which)
    config = hf.load_config(tmp_path / "export")
    exported = hf.load_params(tmp_path / "export", config, dtype="float32", head=head)
    leaves = jax.tree_util.tree_leaves_with_path(hf.load_params(straight / "model", config, dtype="float32", head=head))
    start = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    saved = trained(straight, which)
    for path, there in jax.tree_util.tree_leaves_with_path(exported):
        name = jax.tree_util.keystr(path)
        before = start[name]
        module = name.removesuffix("['kernel']")
        if f"{module}['lora_a']" in saved:
            product = np.float64(saved[f"{module}['lora_a']"]) @ np.float64(saved[f"{module}['lora_b']"])
            np.testing.assert_allclose(there, before + np.float32(2.0 * product), rtol=1e-6, atol=1e-6)
            assert np.any(np.asarray(there) != before)
        else:
            np.testing.assert_array_equal(there, saved.get(name, before))


@pytest.mark.slow
def test_the_newest_checkpoint_answers_as_its_export(straight, tmp_path, convert):
    convert.export_model(straight, tmp_path / "export")
    cfg = adapted(2)
    ours = evaluate.run(cfg, str(straight), tmp_path / "a")
    theirs = evaluate.run(cfg, str(tmp_path / "export"), tmp_path / "b")
    same = ("accuracy", "count", "truncated_share", "response_tokens_mean")
    assert [ours[k] for k in same] == [theirs[k] for k in same]


@pytest.mark.slow
def test_another_rank_does_not_continue_a_run(straight):
    other = adapted(2, model={"lora": {"rank": 2, "alpha": 8.0, "targets": "q_proj,down_proj"}})
    with pytest.raises(configs.InputError, match=r"model.lora.rank: 4 then, 2 now"):
        train.run(other, straight)


@pytest.mark.slow
def test_a_critic_from_elsewhere_keeps_a_base_of_its_own(straight, tmp_path, convert):
    """With its own shape and a head that it brings along; it continues without the directory."""
    actor, critic, workdir = tmp_path / "actor", tmp_path / "critic", tmp_path / "run"
    shutil.copytree(straight / "model", actor)
    shape = dataclasses.replace(hf.load_config(actor), num_hidden_layers=1)
    theirs = tiny.redrawn(0, shape, "score")
    hf.save_params(theirs, shape, critic, dtype="float32")
    sections = {"critic": {"path": str(critic)}, "warmstart": {"steps": 0}, "critic_optim": {"lr": 0.0}}
    base = {"lora": {"rank": 4, "alpha": 8.0, "targets": "q_proj,down_proj"}, "path": str(actor)}
    for iterations in (1, 2):
        train.run(adapted(iterations, model=base, **sections), workdir)
        shutil.rmtree(actor, ignore_errors=True)
        shutil.rmtree(critic, ignore_errors=True)
    convert.export_model(workdir, tmp_path / "export", "critic")
    exported = hf.load_params(tmp_path / "export", shape, dtype="float32", head="score")
    jax.tree.map(np.testing.assert_array_equal, exported, jax.tree.map(np.asarray, theirs))  # its learning rate is 0


def test_shapes_that_a_mesh_splits():
    """An adapter lies as the kernel it stands beside."""
    mesh = sharding.make_mesh(2, 2, 2)
    made = evaluate.Steps(adapted(1), tiny.MODEL, tiny.MODEL, mesh)
    down = made.actor.shardings["model"]["layers"]["mlp"]["down_proj"]
    assert (down["lora_a"].spec, down["lora_b"].spec) == (P(None, "tensor", None), P(None, None, "fsdp"))
    assert made.actor.plain_shardings["model"]["layers"]["mlp"]["down_proj"]["kernel"].spec == P(None, "tensor", "fsdp")
