"""A whole run: start or resume, then from prompts to updated weights, again and again."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo import sharding, warmstart
from jax_ppo.config import Config, to_dict
from jax_ppo.data import task as tasks
from jax_ppo.evaluate import evaluate, make_engine
from jax_ppo.job import Job, adopt, prepare, write_start
from jax_ppo.learner import Learner
from jax_ppo.models import hf
from jax_ppo.ppo.advantages import adapt_kl_coef
from jax_ppo.runtime import checkpoint, distributed, forecast, metrics, report
from jax_ppo.runtime.display import Display, start_table
from jax_ppo.steps import Network, Steps
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
        actor, critic = self._restore() if job.resuming else self._begin()
        base = self._frozen()
        self.learner = Learner(config, self.steps, job.shape, actor, critic, self._reference(actor, base["actor"]), base)
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
        prompts = self.task.batch(i, batch=config.rollout.batch, n=config.rollout.n, seed=config.train.seed)
        with self._profiled(i):
            with self._clock("gen"):
                rollout = self._generate(i, prompts)
            with self._clock("reward"):
                texts = self.task.text(rollout.tokens, rollout.lengths)
                score = partial(self.job.scorer, prompts.problems, texts, rollout.lengths, rollout.finished)
                # Of several processes one asks: the user's function may answer differently each time.
                scores = distributed.from_first(score, np.zeros(len(texts), np.float32))
            experience, measured = self.learner.experience(prompts, rollout, scores, self.kl_coef, self._clock)
            stage = self.display.stage
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

    def _generate(self, i: int, prompts: Prompts) -> Rollout:
        params = self.learner.policy
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), i)
        return self.engine.generate(
            params,
            self.steps.decode_weights(params),
            prompts,
            key,
            temperature=self.config.rollout.temperature,
            top_k=self.config.rollout.top_k,
            top_p=self.config.rollout.top_p,
            progress=lambda done, total: self.display.stage("rollout", done, total),
        )

    def _begin(self) -> tuple[TrainState, TrainState | None]:
        """The networks from their directories, the actor after its warm start."""
        job, config, network = self.job, self.config, self.steps.critic
        warm, dtype, adapted = bool(config.warmstart.steps), config.model.param_dtype, bool(config.model.lora.rank)
        # The first iteration draws from 1.
        keys = jax.random.split(jax.random.fold_in(jax.random.key(config.train.seed), 0))
        # Frozen weights keep the dtype of their file.
        exact = lambda source: hf.stored_dtype(source) if adapted else dtype  # noqa: E731
        params = self._load("actor", job.source, self.steps.actor, dtype if warm else exact(job.source))
        if warm:
            params = self._warm_start(params)
        own = None
        if network and job.critic_source:
            own = self._load("critic", job.critic_source, network, exact(job.critic_source), head="score")
        write_start(job, params, own)
        actor = self.steps.actor.start(self.steps.actor.fresh(keys[0], dtype) if adapted else params)
        if network is None:
            return actor, None
        if adapted or network.alone:
            fresh = network.fresh(keys[1], dtype)
            head = own["score"] if own else fresh["score"]
            return actor, network.start({**fresh, "score": jax.tree.map(lambda x: x.astype(dtype), head)})
        return actor, network.start(own or self._load("critic", job.start if warm else job.source, network, dtype, head="score"))

    def _frozen(self) -> dict[str, Params]:
        """What adapters stand on, by network: the weights of the start, one copy for actor, critic and reference."""
        base: dict[str, Params] = {"actor": {}, "critic": {}}
        if not self.config.model.lora.rank:
            return base
        base["actor"] = self._load("base", self.job.start, self.steps.actor, hf.stored_dtype(self.job.start))
        own, critic = self.job.workdir / "critic", self.steps.critic
        if critic and self.job.critic_source:
            base["critic"] = self._load("base of the critic", own, critic, hf.stored_dtype(own), head="score")
        elif critic and not critic.alone:
            base["critic"] = {"model": base["actor"]["model"]}
        return base

    def _load(self, name: str, source: Path, network: Network, dtype: str, *, head: str = "lm_head") -> Params:
        bar = self.display.bar(f"loading {name}", hf.tensor_count(network.model, head=head))
        return hf.load_params(source, network.model, dtype=dtype, shardings=network.plain_shardings, head=head, progress=bar)

    def _warm_start(self, params: Params) -> Params:
        bar = self.display.bar("warm start", self.config.warmstart.steps)
        prompts, responses = tasks.demonstrations(self.config, self.task)
        began = time.monotonic()
        params, loss = warmstart.warm_start(
            self.config, self.job.actor, self.job.mesh, params, prompts, responses, self.job.shape, bar
        )
        self.display.say(f"warm start: {self.config.warmstart.steps} updates, loss {loss:.3f}, {time.monotonic() - began:.0f} s")
        return params

    def _restore(self) -> tuple[TrainState, TrainState | None]:
        dtype = self.config.model.param_dtype
        wanted: Any = lambda n: checkpoint.abstract(n.state_shapes(dtype), n.state_shardings) if n else None  # noqa: E731
        origin = self.job.origin
        networks = wanted(self.steps.actor), wanted(self.steps.critic)
        if origin:
            self.done, actor, critic, rest, skipped = checkpoint.restore(origin.workdir, *networks, iteration=origin.iteration)
        else:
            self.done, actor, critic, rest, skipped = self.saved.restore(*networks)
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

    def _reference(self, actor: TrainState, base: Params) -> Params | None:
        """The policy of the start, in the dtype it is stored in, so that its log-probabilities are those of the actor then.

        With adapters it is the base with adapters of zero: the program that scores the actor scores it, to the same bits.
        """
        if not self.job.needs_reference:
            return None
        if base:
            return self.steps.actor.whole(jax.tree.map(jnp.zeros_like, actor.params), base)
        return self._load("reference", self.job.start, self.steps.actor, hf.stored_dtype(self.job.start))

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
