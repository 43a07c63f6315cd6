"""What is refused before weights are loaded, each in one line with its numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
import tiny
from safetensors.numpy import load_file

from jax_ppo import config as configs
from jax_ppo import job
from jax_ppo.models import hf
from jax_ppo.types import InputError

GOLDENS = Path(__file__).parent / "goldens"


def config(**sections):
    """A run of the built-in task; keyword section=dict of keys."""
    raw = configs.default_config()
    raw.model.path = raw.data.path = "builtin"
    raw.data.update(max_prompt_tokens=40, train_limit=20, eval_limit=10)
    raw.rollout.update(batch=16, max_response_tokens=16)
    raw.ppo.update(micro_tokens=1024, minibatches=2)
    for name, keys in sections.items():
        raw[name].update(keys)
    return configs.resolve(raw)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"mesh": {"data": 3}}, r"data=3.*number of devices, 8"),
        ({"mesh": {"fsdp": 2, "tensor": 4}}, r"config\.mesh\.tensor=4: must divide the model's 2 key-value heads"),
        ({"model": {"attention": "splash"}}, r"config\.model\.attention='splash': does not run here: it needs a TPU"),
        ({"ppo": {"micro_tokens": 100}}, r"config\.ppo\.micro_tokens=100: .*8 row shards of the mesh, 384"),
        ({"critic": {"path": str(GOLDENS / "qwen2_tied")}}, r"config\.critic\.path=.*vocabulary 64, the actor has 384"),
        ({"model": {"path": str(GOLDENS / "qwen2_tied")}}, "no tokenizer"),
        ({"model": {"path": "/nowhere"}}, r"config\.model\.path='/nowhere': no such directory"),
        ({"data": {"path": "/nowhere.jsonl"}}, "/nowhere.jsonl: no such file"),
        ({"data": {"max_prompt_tokens": 5}}, r"20 of 20 prompts over 5 tokens"),
        ({"reward": {"custom": "nothing.py:score"}}, "nothing.py"),
    ],
)
def test_refusals(tmp_path, sections, said):
    with pytest.raises(InputError, match=said) as refusal:
        job.prepare(config(**sections), tmp_path)
    assert "\n" not in str(refusal.value)


def test_one_file_has_no_held_out_split(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "1+1=", "answer": "#### 2"}) + "\n")
    with pytest.raises(InputError, match=r"is one file.*config\.data\.eval_path"):
        job.prepare(config(data={"path": str(file)}), tmp_path / "run")
    prepared = job.prepare(config(data={"path": str(file), "eval_path": str(file)}), tmp_path / "run")
    assert len(prepared.task.train) == len(prepared.task.test) == 1


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("{", "Expecting property name")])
def test_checkpoints_without_their_configuration(tmp_path, text, said):
    """An imported model, for instance."""
    (tmp_path / "checkpoints" / "0" / "actor").mkdir(parents=True)
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=rf"has checkpoints but no config\.json that can be read \(.*{said}") as refusal:
        job.prepare(config(), tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_critic_of_its_own_is_described_for_continuing(tmp_path):
    """Its shape is read from the workdir once there are checkpoints, even where its directory is gone."""
    shape = dataclasses.replace(hf.load_config(GOLDENS / "qwen2_untied"), vocab_size=384)
    source, workdir = tmp_path / "critic", tmp_path / "run"
    hf.save_params(tiny.redrawn(0, shape, "score"), shape, source, dtype="bfloat16")
    settings = config(critic={"path": str(source)}, ppo={"kl_coef": 0.0})
    first = job.prepare(settings, workdir)
    assert (first.critic_source, first.critic) == (source, shape)
    job.write_start(first, {})
    assert sorted(p.name for p in (workdir / "critic").iterdir()) == ["config.json"]
    assert hf.described_dtype(workdir / "critic") == "bfloat16"
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"config\.critic\.path=.*no such directory"):
        job.prepare(settings, workdir)
    (workdir / "checkpoints" / "3").mkdir(parents=True)
    again = job.prepare(settings, workdir)
    assert again.resuming
    assert (again.critic_source, again.critic, again.actor) == (workdir / "critic", shape, first.actor)


def test_a_new_start_forgets_the_critic_of_the_last_one(tmp_path):
    (tmp_path / "critic").mkdir()
    job.write_start(job.prepare(config(ppo={"kl_coef": 0.0}), tmp_path), {})
    assert not (tmp_path / "critic").exists()
    assert hf.load_config(tmp_path / "model") == hf.load_config(tmp_path / "builtin")
    assert len(load_file(tmp_path / "builtin" / "model.safetensors")) == hf.tensor_count(hf.load_config(tmp_path / "model"))


def test_a_job_reads_everything_but_weights(tmp_path):
    prepared = job.prepare(config(), tmp_path)
    assert not prepared.resuming
    assert prepared.needs_reference
    assert prepared.actor == prepared.critic
    assert prepared.shape == (8, 48)
    assert (len(prepared.task.train), len(prepared.task.test)) == (20, 10)
    assert not dataclasses.replace(prepared, config=config(ppo={"kl_coef": 0.0})).needs_reference
