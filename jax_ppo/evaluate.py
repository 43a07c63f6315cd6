"""Held-out accuracy: greedy, and of several samples a problem.

python -m jax_ppo.evaluate --config=configs/gsm8k.py --checkpoint=(WORKDIR | WORKDIR/checkpoints/N | HF_DIRECTORY)
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo import schema, sharding
from jax_ppo.config import Config
from jax_ppo.data import task as tasks
from jax_ppo.data.task import Task
from jax_ppo.models import hf, lora, qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.rewards import gsm8k
from jax_ppo.rollout.engine import Engine
from jax_ppo.runtime import checkpoint, cli, distributed, hub, metrics
from jax_ppo.runtime.display import Display, start_table
from jax_ppo.steps import Steps, trained_shapes
from jax_ppo.types import InputError, Params, Prompts, Rollout

RULES = ("strict", "flexible", "verl")


class Found(NamedTuple):
    """Where a model is.

    directory: its description, as a Hugging Face directory; with the weights where there is no workdir.
    workdir:   of the run whose checkpoint is meant, or None.
    iteration: of that checkpoint; None for the newest.
    """

    directory: Path
    workdir: Path | None
    iteration: int | None


def find_model(path: str) -> Found:
    """What a path to a model stands for.

    Args:
      path: workdir of a run, whose newest checkpoint is meant; WORKDIR/checkpoints/N; a Hugging Face directory; or a hub id.

    Raises:
      InputError: if it is none of them.
    """
    workdir, iteration = checkpoint.locate(Path(path))
    if (workdir / checkpoint.FOLDER).is_dir():
        return Found(workdir / "model", workdir, iteration)
    return Found(hub.model_directory(path, flag="checkpoint"), None, None)


def load_actor(found: Found, model: QwenConfig, steps: Steps, dtype: str, display: Display) -> tuple[int, Params]:
    """The iteration that a model comes from, 0 for one of Hugging Face, and its parameters where `steps` wants them.

    Raises:
      InputError: if they cannot be read.
    """
    if found.workdir is None:
        bar = display.bar("loading model", hf.tensor_count(model))
        return 0, hf.load_params(found.directory, model, dtype=dtype, shardings=steps.actor.plain_shardings, progress=bar)
    return restore_network(found.workdir, model, steps.mesh, "actor", display, iteration=found.iteration, dtype=dtype)


def restore_network(
    workdir: Path,
    model: QwenConfig,
    mesh: Any,
    which: str,
    display: Display,
    *,
    iteration: int | None = None,
    dtype: str | None = None,
) -> tuple[int, Params]:
    """One network of a checkpoint, with adapters folded into the weights they stand on.

    Args:
      workdir:   of a run, or of an import.
      model:     of the network.
      mesh:      where the parameters go.
      which:     "actor" or "critic".
      display:   says which checkpoints are broken.
      iteration: of the checkpoint; None for the newest that is whole.
      dtype:     of the parameters; None leaves each as it was saved, adapted ones in that of the base.

    Returns:
      The iteration, and all parameters of the network.

    Raises:
      InputError: if they cannot be read.
    """
    file, head = workdir / "config.json", {"actor": "lm_head", "critic": "score"}[which]
    # An import has no configuration, and a run may be older than a key.
    try:
        saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from None
    config: Config = schema.build(Config(), schema.complete(Config(), saved))
    adapters, alone = config.model.lora, which == "critic" and config.critic.trunk == "actor"
    plain = jax.eval_shape(lambda: qwen.init(jax.random.key(0), model, head=head))
    shapes = trained_shapes(adapters, plain, alone=alone) if adapters.rank else plain
    typed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype or x.dtype)), shapes)
    wanted = checkpoint.abstract(typed, sharding.parameter_specs(shapes, mesh))
    done, params, skipped = checkpoint.restore_params(workdir, wanted, item=which, iteration=iteration, cast=dtype is not None)
    for line in skipped:
        display.say(line, "bold red")
    if not adapters.rank:
        return done, params
    if alone:
        _, body = restore_network(workdir, model, mesh, "actor", display, iteration=done, dtype=dtype)
        return done, {"model": body["model"], **params}
    source = workdir / "critic" if which == "critic" and (workdir / "critic").is_dir() else workdir / "model"
    places = sharding.parameter_specs(plain, mesh)
    base = hf.load_params(source, model, dtype=dtype or hf.stored_dtype(source), shardings=places, head=head)
    return done, lora.fold(lora.attach(base, params, adapters.alpha / adapters.rank))


def make_engine(config: Config, steps: Steps, *, prompt_width: int, end_ids: tuple[int, ...], pad_id: int) -> Engine:
    """The sampling engine, the same for training, evaluation and everything else.

    Args:
      config:       slots, segment and limit of the rollout.
      steps:        the jitted functions.
      prompt_width: P, the longest prompt.
      end_ids:      ids that end a response.
      pad_id:       what stands behind the end.
    """
    shards = sharding.row_shards(steps.mesh)
    return Engine(
        programs=steps.rollout,
        shards=shards,
        slots=-(-config.slots // shards) * shards,
        prompt_width=prompt_width,
        limit=config.rollout.max_response_tokens,
        size=min(config.rollout.segment, config.rollout.max_response_tokens),
        end_ids=end_ids,
        pad_id=pad_id,
    )


def evaluate(
    config: Config,
    engine: Engine,
    params: Params,
    weights: Params,
    task: Task,
    *,
    limit: int,
    samples: int,
    progress: Callable[[int, int], Any] = lambda done, total: None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Answers the held-out problems.

    Args:
      config:   the run.
      engine:   from `make_engine`.
      params, weights: the actor, for prefill and for decoding.
      task:     problems and tokenizer.
      limit:    the first problems only; 0 means all.
      samples:  sampled responses a problem, at `rollout.temperature`, beside the greedy one.
      progress: called with (responses done, all).

    Returns:
      Metrics by name, and the result as `eval/NNNNNN.json` stores it. The denominator is the number of problems.
    """
    prompts = task.held_out(limit)
    key = jax.random.key(config.train.seed)
    greedy = engine.generate(params, weights, prompts, key, temperature=0.0, progress=progress)
    right = _grade(task, prompts, greedy)
    count = len(prompts.problems)
    truncated = float(np.mean(~greedy.finished))
    # The run's own rule is `acc`; the other two stand beside it under their names.
    headline = {"acc": config.reward.method, "acc_flexible": "flexible", "acc_verl": "verl"}
    result: dict[str, Any] = {
        "dataset": task.name,
        "count": count,
        "accuracy": {rule: float(x.mean()) for rule, x in right.items()},
        "standard_error": {rule: _standard_error(x) for rule, x in right.items()},
        "truncated_share": truncated,
        "response_tokens_mean": float(greedy.lengths.mean()),
    }
    named = {f"val-core/{task.name}/{name}/mean@1": result["accuracy"][rule] for name, rule in headline.items()}
    named[f"val-aux/{task.name}/truncated_frac"] = truncated
    if samples:
        many = Prompts(prompts.problems * samples, prompts.tokens * samples, np.arange(count * samples))
        sampling = config.rollout
        drawn = engine.generate(
            params,
            weights,
            many,
            jax.random.fold_in(key, 1),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        each = _grade(task, many, drawn)[config.reward.method].reshape(samples, count)
        result |= {"samples": samples, "sampled_mean": float(each.mean()), "sampled_best": float(each.max(axis=0).mean())}
        named[f"val-core/{task.name}/acc/mean@{samples}"] = result["sampled_mean"]
        named[f"val-core/{task.name}/acc/best@{samples}"] = result["sampled_best"]
    return named, result


def _grade(task: Task, prompts: Prompts, rollout: Rollout) -> dict[str, np.ndarray]:
    texts = task.text(rollout.tokens, rollout.lengths)
    return {
        rule: np.array([gsm8k.score(text, p.answer, method=rule) for text, p in zip(texts, prompts.problems, strict=True)])
        for rule in RULES
    }


def _standard_error(x: np.ndarray) -> float:
    return math.sqrt(float(x.mean()) * (1.0 - float(x.mean())) / len(x))


def run(config: Config, checkpoint_path: str, workdir: Path) -> dict[str, Any]:
    """Evaluates a checkpoint on all held-out problems, prints a table and writes `eval/*.json`.

    Args:
      config:          data, prompt format and response limit.
      checkpoint_path: workdir of a run, whose newest checkpoint is taken; WORKDIR/checkpoints/N; or a Hugging Face directory or
        hub id.
      workdir:         where the result of a Hugging Face model goes; that of a run goes beside its checkpoints.

    Returns:
      The result.

    Raises:
      InputError: for anything wrong in the configuration, the data or the checkpoint.
    """
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)

    def read() -> tuple[Found, QwenConfig, Task]:
        found = find_model(checkpoint_path)
        return found, hf.load_config(found.directory), tasks.load(config, found.directory)

    found, model, task = distributed.agree(read, lambda made: {"model": str(made[1]), **made[2].facts()})
    steps = Steps(config, model, None, mesh)
    with jax.set_mesh(mesh), Display(0) as display:
        if steps.actor.attention.note:
            display.say(f"attention: {steps.actor.attention.note}", "yellow")
        iteration, params = load_actor(found, model, steps, config.model.param_dtype, display)
        weights = steps.decode_weights(params)
        engine = make_engine(config, steps, prompt_width=task.prompt_width, end_ids=task.end_ids, pad_id=task.pad_id)
        engine.compile(params, weights, lambda done, total: display.stage("compiling", done, total))
        _, result = evaluate(
            config,
            engine,
            params,
            weights,
            task,
            limit=0,
            samples=config.eval.samples,
            progress=lambda done, total: display.stage("evaluation", done, total),
        )
    file = (found.workdir or workdir) / "eval" / f"{iteration:06d}-full.json"
    if distributed.is_first():
        metrics.replace_file(file, json.dumps({"iteration": iteration, "checkpoint": checkpoint_path, **result}, indent=2) + "\n")
    rows = [(f"{rule} accuracy", f"{x:.4f} +- {result['standard_error'][rule]:.4f}") for rule, x in result["accuracy"].items()]
    if "samples" in result:
        rows += [(f"mean and best of {result['samples']} samples", f"{result['sampled_mean']:.4f}, {result['sampled_best']:.4f}")]
    rows += [("truncated", f"{result['truncated_share']:.4f}"), ("problems", str(result["count"])), ("written to", str(file))]
    start_table(rows, f"{task.name}: {checkpoint_path}, iteration {iteration}")
    return result


def main(argv: list[str]) -> int:
    """Parses the command line and evaluates; returns the exit code."""

    def work(config: Config, values: SimpleNamespace) -> None:
        distributed.join(config.train.heartbeat_seconds)
        run(config, values.checkpoint, values.workdir)

    strings = {"checkpoint": "workdir of a run, its checkpoints/N for a certain one, or a Hugging Face directory"}
    return distributed.end(lambda: cli.main(argv, work, module="jax_ppo.evaluate", strings=strings))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
