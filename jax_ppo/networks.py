"""Where the networks of a run come from: their directories, a warm start, or a checkpoint."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo import warmstart
from jax_ppo.data import task as tasks
from jax_ppo.job import Job, write_start
from jax_ppo.learner import Learner
from jax_ppo.models import hf
from jax_ppo.runtime import checkpoint
from jax_ppo.runtime.display import Display
from jax_ppo.steps import Network, Steps
from jax_ppo.types import Params, TrainState


class Loader:
    """Brings the networks of a job onto its mesh, with progress on a display."""

    def __init__(self, job: Job, steps: Steps, display: Display):
        """Args: the job, its jitted functions, and where to show how far loading is."""
        self.job, self.steps, self.display = job, steps, display

    def begin(self) -> tuple[TrainState, TrainState | None]:
        """The networks from their directories, the actor after its warm start; writes what describes them into the workdir."""
        job, config, network = self.job, self.job.config, self.steps.critic
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

    def restore(
        self, workdir: Path, iteration: int | None = None
    ) -> tuple[int, TrainState, TrainState | None, dict[str, Any], list[str]]:
        """The networks of a checkpoint, as `checkpoint.restore` reads them; nothing is changed on disk."""
        dtype = self.job.config.model.param_dtype
        wanted: Any = lambda n: checkpoint.abstract(n.state_shapes(dtype), n.state_shardings) if n else None  # noqa: E731
        return checkpoint.restore(workdir, wanted(self.steps.actor), wanted(self.steps.critic), iteration=iteration)

    def learner(self, actor: TrainState, critic: TrainState | None) -> Learner:
        """The networks with what they stand on and the reference, ready to learn."""
        base = self._frozen()
        reference = self._reference(actor, base["actor"])
        return Learner(self.job.config, self.steps, self.job.shape, actor, critic, reference, base)

    def _frozen(self) -> dict[str, Params]:
        """What adapters stand on, by network: the weights of the start, one copy for actor, critic and reference."""
        base: dict[str, Params] = {"actor": {}, "critic": {}}
        if not self.job.config.model.lora.rank:
            return base
        base["actor"] = self._load("base", self.job.start, self.steps.actor, hf.stored_dtype(self.job.start))
        own, critic = self.job.workdir / "critic", self.steps.critic
        if critic and self.job.critic_source:
            base["critic"] = self._load("base of the critic", own, critic, hf.stored_dtype(own), head="score")
        elif critic and not critic.alone:
            base["critic"] = {"model": base["actor"]["model"]}
        return base

    def _reference(self, actor: TrainState, base: Params) -> Params | None:
        """The policy of the start, in the dtype it is stored in, so that its log-probabilities are those of the actor then.

        With adapters it is the base with adapters of zero: the program that scores the actor scores it, to the same bits.
        """
        if not self.job.needs_reference:
            return None
        if base:
            return self.steps.actor.whole(jax.tree.map(jnp.zeros_like, actor.params), base)
        return self._load("reference", self.job.start, self.steps.actor, hf.stored_dtype(self.job.start))

    def _load(self, name: str, source: Path, network: Network, dtype: str, *, head: str = "lm_head") -> Params:
        bar = self.display.bar(f"loading {name}", hf.tensor_count(network.model, head=head))
        return hf.load_params(source, network.model, dtype=dtype, shardings=network.plain_shardings, head=head, progress=bar)

    def _warm_start(self, params: Params) -> Params:
        job, count = self.job, self.job.config.warmstart.steps
        bar = self.display.bar("warm start", count)
        prompts, responses = tasks.demonstrations(job.config, job.task)
        began = time.monotonic()
        params, loss = warmstart.warm_start(job.config, job.actor, job.mesh, params, prompts, responses, job.shape, bar)
        self.display.say(f"warm start: {count} updates, loss {loss:.3f}, {time.monotonic() - began:.0f} s")
        return params
