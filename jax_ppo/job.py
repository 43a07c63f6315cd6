"""Everything of a run that is checked and read before weights are loaded, and where its networks come from."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from jax_ppo.runtime import checkpoint, distributed, hub, metrics
from jax_ppo.steps import Steps
from jax_ppo.types import InputError, Params

# Keys that may differ when a run is continued, by prefix: they change how long, how fast and what is shown, not what is computed.
CHANGEABLE = (
    "train.iterations train.resume train.max_skipped train.heartbeat_seconds rollout.slots rollout.segment model.path model.attention"
    " model.remat critic.path data.path data.eval_path data.eval_limit ppo.micro_tokens mesh. eval. checkpoint. log."
).split()


class Origin(NamedTuple):
    """A checkpoint of another run: its workdir, and the iteration, or None for the newest one."""

    workdir: Path
    iteration: int | None


@dataclass(frozen=True)
class Job:
    """A run, ready to load weights.

    source:   Hugging Face directory the actor comes from; that in a workdir when the run continues something.
    critic_source: directory of the critic's backbone, or None for the actor's; likewise.
    critic:   None where no critic is trained.
    shape:    (N, L) of a micro-batch.
    resuming: whether the networks come from a checkpoint.
    origin:   of that checkpoint where it is another run's, or None.
    notes:    lines for the reader.
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
    origin: Origin | None
    notes: tuple[str, ...]

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
      InputError: for anything wrong in configuration, workdir, data or model files, or, of several processes, for what differs.
    """
    distributed.first(lambda: _write_builtin(config, workdir))
    return distributed.agree(lambda: _read(config, workdir), _facts)


def adopt(job: Job) -> None:
    """Copies what describes the networks of the run that the checkpoint comes from, and its weights of the start."""
    if job.origin and distributed.is_first():
        for name in ("model", "critic"):
            shutil.rmtree(job.workdir / name, ignore_errors=True)
            if (job.origin.workdir / name).is_dir():
                shutil.copytree(job.origin.workdir / name, job.workdir / name)
        _write_config(job)
    distributed.wait()


def _read(config: Config, workdir: Path) -> Job:
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    origin, before = _before(config, workdir)
    resuming, notes = before is not None, _bends(config, before)
    scorer = make_scorer(config.reward, config.rollout.max_response_tokens)
    if config.log.wandb:
        metrics.require_wandb()
    described = origin.workdir if origin else workdir
    source = described / "model" if resuming else _source(config, workdir)
    actor = hf.load_config(source)
    if not resuming:
        hf.check_params(source, actor)
    critic_source = _critic_source(config, described, resuming)
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
    return Job(config, workdir, mesh, source, critic_source, actor, critic, task, scorer, shape, resuming, origin, notes)


def _facts(job: Job) -> dict[str, Any]:
    """What must be the same in every process."""
    keys = {f"config.{name}": value for name, value in schema.flat(to_dict(job.config))}
    files = {
        name: {f.name: f.stat().st_size for f in sorted(folder.glob("*.safetensors"))} if folder else {}
        for name, folder in (("files of the actor", job.source), ("files of the critic", job.critic_source))
    }
    checkpoints = {"checkpoints": checkpoint.saved_steps(job.origin.workdir if job.origin else job.workdir)}
    models = {"actor": str(job.actor), "critic": str(job.critic)}
    return {"workdir": str(job.workdir), **keys, **job.task.facts(), **models, **files, **checkpoints}


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
    if distributed.is_first():
        for old in (job.start, job.workdir / "critic"):
            shutil.rmtree(old, ignore_errors=True)
        # Before the first checkpoint: a run that dies right behind it must know what it was.
        _write_config(job)
    if job.config.warmstart.steps:
        hf.save_params(params, job.actor, job.start, dtype="float32", source=job.source)
    elif job.needs_reference or adapted:
        hf.save_params(params, job.actor, job.start, dtype=hf.stored_dtype(job.source), source=job.source)
    elif distributed.is_first():
        hf.write_description(job.actor, job.start, dtype=hf.stored_dtype(job.source), source=job.source)
    if job.critic_source and job.critic:
        dtype, target = hf.stored_dtype(job.critic_source), job.workdir / "critic"
        if adapted and critic:
            hf.save_params(critic, job.critic, target, dtype=dtype, source=job.critic_source)
        elif distributed.is_first():
            hf.write_description(job.critic, target, dtype=dtype, critic=True, source=job.critic_source)
    distributed.wait()


def _write_config(job: Job) -> None:
    metrics.replace_file(job.workdir / "config.json", json.dumps(to_dict(job.config), indent=2) + "\n")


def _before(config: Config, workdir: Path) -> tuple[Origin | None, dict[str, Any] | None]:
    """What the run continues: another run's checkpoint or None; and the configuration it was made by, or None for a fresh start."""
    resume, used = config.train.resume, bool(checkpoint.saved_steps(workdir))
    if resume == "never" and used:
        raise InputError(f"config.train.resume='never': {workdir} has checkpoints; choose another --workdir, or resume='auto'")
    if resume in ("auto", "never"):
        return None, _configuration(config, workdir) if used else None
    if used:
        then = _configuration(config, workdir)
        if then["train"]["resume"] == resume:  # the same command again, after this workdir was begun
            return None, then
        raise InputError(f"config.train.resume={resume!r}: {workdir} has checkpoints of its own; choose another --workdir")
    origin = Origin(*checkpoint.locate(Path(resume)))
    steps = checkpoint.saved_steps(origin.workdir)
    if not steps:
        raise InputError(f"config.train.resume={resume!r}: neither auto, never, nor a run with checkpoints")
    if origin.iteration not in (None, *steps):
        raise InputError(f"config.train.resume={resume!r}: no such checkpoint; there are {', '.join(map(str, steps))}")
    return origin, _configuration(config, origin.workdir)


def _bends(config: Config, before: dict[str, Any] | None) -> tuple[str, ...]:
    """Says where a learning rate leaves the line that it was on."""
    then, now = before["train"]["iterations"] if before else config.train.iterations, config.train.iterations
    falling = [f"{n}_optim" for n in ("actor", "critic") if getattr(config, f"{n}_optim").schedule != "constant"]
    if then == now or not falling:
        return ()
    names = " and ".join(f"{name}.schedule={getattr(config, name).schedule}" for name in falling)
    return (f"train.iterations was {then} and is {now}: {names} now ends at iteration {now}, so the learning rate jumps here",)


def _configuration(config: Config, workdir: Path) -> dict[str, Any]:
    """The configuration that a workdir was made by; refuses one that differs where it must not."""
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
    return then


def _critic_source(config: Config, workdir: Path, resuming: bool) -> Path | None:
    if resuming:
        return workdir / "critic" if (workdir / "critic").is_dir() else None
    return hub.model_directory(config.critic.path, flag="config.critic.path") if config.critic.path else None


def _source(config: Config, workdir: Path) -> Path:
    if config.model.path != "builtin":
        return hub.model_directory(config.model.path, flag="config.model.path")
    return workdir / "builtin"


def _write_builtin(config: Config, workdir: Path) -> None:
    """Writes the built-in model where the run starts from it."""
    if config.model.path == "builtin" and _before(config, workdir)[1] is None:
        _builtin(workdir / "builtin", config.train.seed)


def _builtin(directory: Path, seed: int) -> None:
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
