"""A whole run: start or resume, then from prompts to updated weights, again and again."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ppo import sharding
from jax_ppo.config import Config, to_dict
from jax_ppo.evaluate import evaluate, make_engine
from jax_ppo.job import Job, adopt, prepare
from jax_ppo.learner import Clock
from jax_ppo.networks import Loader
from jax_ppo.ppo.advantages import adapt_kl_coef
from jax_ppo.rollout.engine import Engine
from jax_ppo.runtime import checkpoint, distributed, forecast, metrics, report
from jax_ppo.runtime.display import Display, start_table
from jax_ppo.steps import Steps
from jax_ppo.types import Params, Prompts, Rollout, TrainState


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Trains, or continues to train.

    Args:
      config:  the resolved configuration.
      workdir: where everything goes.

    Returns:
      The metrics of the last iteration of this call; empty if there was nothing left to do.

    Raises:
      InputError: before weights are loaded, for anything wrong in configuration, data or model files.
      RunError:   for a failure while running.
    """
    return carry_out(prepare(config, workdir))


def carry_out(job: Job) -> dict[str, Any]:
    """Does a job that is prepared; see `run`. SIGTERM and Ctrl-C end it after the current iteration, saved."""
    with jax.set_mesh(job.mesh), _signals() as stopped, Display(job.config.train.iterations) as display:
        return Trainer(job, display).train(stopped)


class Sampled(NamedTuple):
    """What the actor said in an iteration: B prompts, their responses, the texts of these, and [B] float32 scores."""

    prompts: Prompts
    rollout: Rollout
    texts: list[str]
    scores: np.ndarray


def sample(
    job: Job,
    steps: Steps,
    engine: Engine,
    policy: Params,
    i: int,
    clock: Clock = nullcontext,
    progress: Callable[[str, int, int], Any] = lambda stage, done, total: None,
) -> Sampled:
    """Samples the responses of an iteration and scores them.

    Args:
      job:    the run.
      steps, engine: its jitted functions, and what samples with them.
      policy: all weights of the actor.
      i:      the iteration, from 1; with the seed it gives prompts and randomness.
      clock:  clock(stage) is a context that times a stage.
      progress: called with (stage, responses done, all).
    """
    sampling, seed = job.config.rollout, job.config.train.seed
    prompts = job.task.batch(i, batch=sampling.batch, n=sampling.n, seed=seed)
    with clock("gen"):
        rollout = engine.generate(
            policy,
            steps.decode_weights(policy),
            prompts,
            jax.random.fold_in(jax.random.key(seed), i),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            progress=partial(progress, "rollout"),
        )
    with clock("reward"):
        texts = job.task.text(rollout.tokens, rollout.lengths)
        score = partial(job.scorer, prompts.problems, texts, rollout.lengths, rollout.finished)
        # Of several processes one asks: the user's function may answer differently each time.
        scores = distributed.from_first(score, np.zeros(len(texts), np.float32))
    return Sampled(prompts, rollout, texts, scores)


class Trainer:
    """A run in progress.

    learner: both networks and the reference.
    done:    iterations done.
    kl_coef: weight of the KL penalty; adapted where `ppo.kl_target` is set.
    wall:    seconds of the run so far, earlier processes included.
    tracker: id of the tracker's run, or "".
    """

    def __init__(self, job: Job, display: Display):
        """Shows what will be done, then loads the networks or restores them."""
        config = job.config
        self.job, self.config, self.task, self.display = job, config, job.task, display
        self.steps = Steps(config, job.actor, job.critic, job.mesh)
        task = job.task
        self.engine = make_engine(config, self.steps, prompt_width=task.prompt_width, end_ids=task.end_ids, pad_id=task.pad_id)
        self.saved = checkpoint.Checkpoints(
            job.workdir, keep_last=config.checkpoint.keep_last, keep_best=config.checkpoint.keep_best
        )
        self.done, self.kl_coef, self.wall, self.tracker = 0, config.ppo.kl_coef, 0.0, ""
        self.seconds: dict[str, float] = {}
        self.iteration = 0
        start_table(
            forecast.overview(config, self.steps, self.task, job.shape), f"jax_ppo: {job.workdir}", console=display.console
        )
        for note in [*job.notes, *self.task.notes]:
            display.say(note, "yellow")
        loader = Loader(job, self.steps, display)
        self.learner = loader.learner(*(self._restore(loader) if job.resuming else loader.begin()))
        if job.origin or (self.done == 0 and not job.resuming and config.warmstart.steps):
            self._save(self.done, None)

    def train(self, stopped: list[int]) -> dict[str, Any]:
        """The loop. Ends early, saved, once `stopped` holds a signal."""
        config, last = self.config, dict[str, Any]()
        self._compile()
        with self._writer() as writer:
            if self.done == 0 and config.eval.every and config.eval.at_start:
                self._show(writer, 0, self._evaluate(0))
            for i in range(self.done + 1, config.train.iterations + 1):
                last = self.iterate(i)
                self.saved.check()
                number = distributed.largest(stopped[0] if stopped else 0)  # one process may have heard it before the others
                stop = bool(number) or i == config.train.iterations
                if config.eval.every and (i % config.eval.every == 0 or i == config.train.iterations):
                    last |= self._evaluate(i)
                if stop or i % config.checkpoint.every == 0:
                    self._save(i, last.get(f"val-core/{self.task.name}/acc/mean@1"))
                last |= self._timings()
                self._show(writer, i, last)
                if number and i < config.train.iterations:
                    self.display.say(f"signal {number}: saved iteration {i}; the same command continues", "yellow")
                    break
        self.saved.close()
        if distributed.is_first():
            report.write_report(self.job.workdir)
        if not last:
            self.display.say(
                f"iteration {self.done} of {config.train.iterations} is done; raise config.train.iterations to go on"
            )
        return last

    def iterate(self, i: int) -> dict[str, Any]:
        """One iteration: prompts, responses, scores, experience, updates. Returns its metrics."""
        config, start = self.config, time.monotonic()
        self.seconds, self.iteration = {}, i
        stage = self.display.stage
        with self._profiled(i):
            prompts, rollout, texts, scores = sample(
                self.job, self.steps, self.engine, self.learner.policy, i, self._clock, stage
            )
            experience, measured = self.learner.experience(prompts, rollout, scores, self.kl_coef, self._clock)
            measured |= self.learner.update(prompts, rollout, experience, i, self._clock, stage)
        if config.ppo.kl_target:
            kl = measured["actor/reward_kl_penalty"]
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, target=config.ppo.kl_target, count=len(scores))
        self.seconds["step"] = time.monotonic() - start
        self._write_samples(i, prompts, rollout, texts, scores)
        self.done = i
        return measured | self._lengths(i, prompts, rollout) | self._utilisation(measured)

    def _compile(self) -> None:
        params = self.learner.policy
        weights = sharding.result(self.steps.decode_weights.lower(params))
        self.engine.compile(params, weights, lambda done, total: self.display.stage("compiling", done, total))

    def _restore(self, loader: Loader) -> tuple[TrainState, TrainState | None]:
        origin = self.job.origin
        self.done, actor, critic, rest, skipped = loader.restore(*(origin or (self.job.workdir, None)))
        for line in skipped:
            self.display.say(f"{line}; going back to {self.done}", "bold red")
        self.kl_coef, self.wall = rest["kl_coef"], rest["wall"]
        if origin:
            adopt(self.job)
        else:
            self.tracker = rest.get("tracker", "")
            self.saved.discard_after(self.done)
        self.display.say(f"continuing after iteration {self.done}" + (f" of {origin.workdir}" if origin else ""))
        return actor, critic

    def _evaluate(self, i: int) -> dict[str, Any]:
        params = self.learner.policy
        with self._clock("testing"):
            named, result = evaluate(
                self.config,
                self.engine,
                params,
                self.steps.decode_weights(params),
                self.task,
                limit=self.config.eval.limit,
                samples=self.config.eval.samples,
                progress=lambda done, total: self.display.stage("evaluation", done, total),
            )
        if distributed.is_first():
            metrics.write_eval(self.job.workdir, i, result)
        return named

    def _save(self, i: int, score: float | None) -> None:
        rest = {
            "iteration": i,
            "kl_coef": self.kl_coef,
            "wall": self.wall,
            "tracker": self.tracker,
            "config": to_dict(self.config),
        }
        with self._clock("save_checkpoint"):
            self.saved.save(i, self.learner.actor, self.learner.critic, rest, score)

    @contextmanager
    def _writer(self) -> Iterator[metrics.Writer | None]:
        """The writer of the run; of several processes, the first one's."""
        if not distributed.is_first():
            yield None
            return
        config = self.config
        options: dict[str, Any] = {"tensorboard": config.log.tensorboard, "wandb": config.log.wandb, "config": to_dict(config)}
        with metrics.Writer(self.job.workdir, resume_after=self.done, tracker=self.tracker, **options) as writer:
            self.tracker = writer.tracker
            yield writer

    def _show(self, writer: metrics.Writer | None, i: int, values: dict[str, Any]) -> None:
        if writer:
            writer.write(i, values)
        self.display.iteration(i, values)

    def _lengths(self, i: int, prompts: Prompts, rollout: Rollout) -> dict[str, Any]:
        """Metrics that need no network."""
        named: dict[str, Any] = {}
        for name, x in {"response_length": rollout.lengths, "prompt_length": prompts.lengths}.items():
            named |= {f"{name}/mean": float(x.mean()), f"{name}/max": int(x.max()), f"{name}/min": int(x.min())}
        tokens = int(rollout.lengths.sum() + prompts.lengths.sum())
        memory = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices() if d.platform != "cpu"]
        return named | {
            "response_length/clip_ratio": float(np.mean(rollout.lengths == rollout.tokens.shape[1])),
            "training/truncated_frac": float(np.mean(~rollout.finished)),
            "training/global_step": i,
            "training/epoch": (i - 1) * self.config.rollout.batch // len(self.task.train),
            "training/updates": int(self.learner.actor.updates),
            "perf/throughput": tokens / self.seconds["step"] / jax.device_count(),
            "perf/max_memory_allocated_gb": max(m for m in memory if m) / 1e9 if any(memory) else None,
        }

    def _utilisation(self, measured: dict[str, Any]) -> dict[str, float]:
        """Of the peak rate, where it is known for this device."""
        peak = forecast.peak_flops(jax.devices()[0].device_kind)
        works = {name: measured.get(f"perf/update_tflop/{name}") for name in ("actor", "critic")}
        return {
            f"perf/mfu/{name}": 1e12 * work / (self.seconds[f"update_{name}"] * jax.device_count() * peak)
            for name, work in works.items()
            if work and peak
        }

    def _timings(self) -> dict[str, float]:
        self.wall += sum(self.seconds.get(name, 0.0) for name in ("step", "testing", "save_checkpoint"))
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()} | {"time/wall_s": self.wall}

    def _write_samples(self, i: int, prompts: Prompts, rollout: Rollout, texts: list[str], scores: np.ndarray) -> None:
        if not self.config.log.samples or not distributed.is_first():
            return
        rows = [
            {
                "prompt": p.question,
                "response": texts[b],
                "answer": p.answer,
                "score": float(scores[b]),
                "finish": "eos" if rollout.finished[b] else "length",
                "prompt_length": len(prompts.tokens[b]),
                "response_length": int(rollout.lengths[b]),
            }
            for b, p in enumerate(prompts.problems[: self.config.log.samples])
        ]
        metrics.write_samples(self.job.workdir, i, rows)

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        distributed.note(f"iteration {self.iteration}, stage {stage}")
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    @contextmanager
    def _profiled(self, i: int) -> Iterator[None]:
        if i != self.config.log.profile:
            yield
            return
        with jax.profiler.trace(str(self.job.workdir / "profile")):
            yield


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the first SIGTERM or SIGINT; a second one ends the process at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
