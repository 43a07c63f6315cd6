"""Everything of a run that is checked and read before weights are loaded, and where its networks come from."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_ppo import schema, sharding
from jax_ppo.config import Config, keys, to_dict
from jax_ppo.data import arithmetic
from jax_ppo.data import task as tasks
from jax_ppo.data.task import Task
from jax_ppo.learner import row_shape
from jax_ppo.models import hf, qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rewards import Scorer, make_scorer
from jax_ppo.runtime import hub, metrics
from jax_ppo.steps import Steps
from jax_ppo.types import InputError, Params

# Keys that may differ when a run is continued, by prefix: they change how long, how fast and what is shown, not what is computed.
CHANGEABLE = (
    "train.iterations train.resume train.max_skipped rollout.slots rollout.segment model.path model.attention model.remat critic.path"
    " data.path data.eval_path data.eval_limit ppo.micro_tokens mesh. eval. checkpoint. log."
).split()


@dataclass(frozen=True)
class Job:
    """A run, ready to load weights.

    source:   Hugging Face directory the actor comes from; WORKDIR/model when the run is continued.
    critic_source: directory of the critic's backbone, or None for the actor's; WORKDIR/critic when the run is continued.
    critic:   None where no critic is trained.
    shape:    (N, L) of a micro-batch.
    resuming: whether WORKDIR has checkpoints.
    """

    config: Config
    workdir: Path
    mesh: Any
    source: Path
    critic_source: Path | None
    actor: QwenConfig
    critic: QwenConfig | None
    task: Task
    scorer: Scorer
    shape: tuple[int, int]
    resuming: bool

    @property
    def start(self) -> Path:
        """WORKDIR/model: configuration and tokenizer of the model the run starts from, and its weights where something needs them."""
        return self.workdir / "model"

    @property
    def needs_reference(self) -> bool:
        """Whether any KL to the policy of the start is asked for."""
        return bool(self.config.ppo.kl_coef or self.config.ppo.kl_loss_coef)


def prepare(config: Config, workdir: Path) -> Job:
    """Checks and reads everything but weights.

    Args:
      config:  the resolved configuration.
      workdir: of the run.

    Raises:
      InputError: for anything wrong in configuration, workdir, data or model files.
    """
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    resuming = _resuming(config, workdir)
    scorer = make_scorer(config.reward, config.rollout.max_response_tokens)
    if config.log.wandb:
        metrics.require_wandb()
    source = workdir / "model" if resuming else _source(config, workdir)
    actor = hf.load_config(source)
    if not resuming:
        hf.check_params(source, actor)
    critic_source = _critic_source(config, workdir, resuming)
    critic = hf.load_config(critic_source) if critic_source else actor if config.has_critic else None
    if critic_source and critic and not resuming:
        hf.check_params(critic_source, critic, head="score")
        if critic.vocab_size != actor.vocab_size:
            raise InputError(
                f"config.critic.path={config.critic.path!r}: vocabulary {critic.vocab_size}, the actor has {actor.vocab_size}"
            )
    Steps(config, actor, critic, mesh)  # refuses what the mesh does not divide
    task = tasks.load(config, source)
    if len(task.tokenizer) > actor.vocab_size:
        raise InputError(f"{source}: the tokenizer has {len(task.tokenizer)} ids, the model {actor.vocab_size}")
    shape = row_shape(config, task.prompt_width, sharding.row_shards(mesh))
    return Job(config, workdir, mesh, source, critic_source, actor, critic, task, scorer, shape, resuming)


def write_start(job: Job, params: Params, critic: Params | None = None) -> None:
    """Writes what a run needs to continue, and its checkpoints to be exported, without the directories it came from.

    That is WORKDIR/config.json; WORKDIR/model, with weights after a warm start, where a reference is needed and under adapters,
    else only what describes it; and WORKDIR/critic of a critic that has a backbone of its own, with weights under adapters.

    Args:
      job:    the run.
      params: of the actor at its start.
      critic: of a critic that has a backbone of its own.
    """
    adapted = bool(job.config.model.lora.rank)
    for old in (job.start, job.workdir / "critic"):
        shutil.rmtree(old, ignore_errors=True)
    # Before the first checkpoint: a run that dies right behind it must know what it was.
    metrics.replace_file(job.workdir / "config.json", json.dumps(to_dict(job.config), indent=2) + "\n")
    if job.config.warmstart.steps:
        hf.save_params(params, job.actor, job.start, dtype="float32", source=job.source)
    elif job.needs_reference or adapted:
        hf.save_params(params, job.actor, job.start, dtype=hf.stored_dtype(job.source), source=job.source)
    else:
        hf.write_description(job.actor, job.start, dtype=hf.stored_dtype(job.source), source=job.source)
    if job.critic_source and job.critic:
        dtype = hf.stored_dtype(job.critic_source)
        if adapted and critic:
            hf.save_params(critic, job.critic, job.workdir / "critic", dtype=dtype, source=job.critic_source)
            return
        hf.write_description(job.critic, job.workdir / "critic", dtype=dtype, critic=True, source=job.critic_source)


def _resuming(config: Config, workdir: Path) -> bool:
    """Whether the run continues; refuses a workdir that belongs to another configuration."""
    steps = workdir / "checkpoints"
    if not steps.is_dir() or not any(p.name.isdigit() for p in steps.iterdir()):
        return False
    if config.train.resume == "never":
        raise InputError(f"config.train.resume='never': {workdir} has checkpoints; choose another --workdir, or resume='auto'")
    try:
        then, now = json.loads((workdir / "config.json").read_text(encoding="utf-8")), to_dict(config)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{workdir}: has checkpoints but no config.json that can be read ({error}): not a run to continue; choose another --workdir"
        ) from None
    # A key that did not exist then had the effect of its default.
    before = {name: key.default for name, key in keys().items()} | dict(schema.flat(then))
    different = [
        f"{name}: {before[name]!r} then, {value!r} now"
        for name, value in schema.flat(now)
        if before[name] != value and not name.startswith(tuple(CHANGEABLE))
    ]
    if different:
        raise InputError(f"{workdir} was made by another configuration ({'; '.join(different)}); choose another --workdir")
    return True


def _critic_source(config: Config, workdir: Path, resuming: bool) -> Path | None:
    if resuming:
        return workdir / "critic" if (workdir / "critic").is_dir() else None
    return hub.model_directory(config.critic.path, flag="config.critic.path") if config.critic.path else None


def _source(config: Config, workdir: Path) -> Path:
    if config.model.path != "builtin":
        return hub.model_directory(config.model.path, flag="config.model.path")
    return _builtin(workdir / "builtin", config.train.seed)


def _builtin(directory: Path, seed: int) -> Path:
    """The small model of the built-in task with random weights, as a Hugging Face directory like any other."""
    described = directory.with_name("builtin.description")
    for old in (directory, described):
        shutil.rmtree(old, ignore_errors=True)
    described.mkdir(parents=True)
    (described / "config.json").write_text(json.dumps(arithmetic.MODEL, indent=2))
    arithmetic.tokenizer().save_pretrained(described)
    model = hf.load_config(described)
    hf.save_params(qwen.init(jax.random.key(seed), model), model, directory, dtype="float32", source=described)
    shutil.rmtree(described, ignore_errors=True)
    return directory
