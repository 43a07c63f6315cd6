"""Every jitted function of a run, with its shardings and donations: the only place with `jax.jit`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ppo import probe, sharding
from jax_ppo.config import Config, LoraConfig, OptimConfig
from jax_ppo.models import lora, qwen
from jax_ppo.models.layers import QwenConfig
from jax_ppo.ppo import optimizer, update
from jax_ppo.rollout import decoding
from jax_ppo.types import InputError, Params, TrainState


def compute_dtype(name: str) -> Any:
    """The dtype of matmuls and cache; "auto" is bfloat16 on accelerators, float32 on a CPU."""
    if name == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(name)


def trained_shapes(adapters: LoraConfig, plain: Params, *, alone: bool) -> Params:
    """Shapes of what trains of a network with the shapes `plain`: all of it, adapters and the head, or a critic's head alone."""
    if alone:
        return {"score": plain["score"]}
    return lora.trained(plain, adapters.rank, set(adapters.targets.split(","))) if adapters.rank else plain


class Waiting:
    """A jitted function that returns when its results are there; everything else of it is as before.

    Programs with collectives that pile up starve each other of threads on a CPU that stands for several devices, until XLA ends
    the process. On accelerators, and on one device, the host runs ahead.
    """

    def __init__(self, jitted: Any):
        """Args: the result of `jax.jit`."""
        self._jitted = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it, and waits."""
        return jax.block_until_ready(self._jitted(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def jit(mesh: Mesh, function: Any, **options: Any) -> Any:
    """`jax.jit` for a function on a mesh, whose devices need not be there if it is only lowered."""
    jitted = jax.jit(function, **options)
    virtual = isinstance(mesh, Mesh) and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return Waiting(jitted) if virtual else jitted


class Network:
    """One network in training: where its parameters live, its optimizer, its jitted steps.

    The objective of a micro-batch is a sum divided by a count of the whole minibatch, so `accumulate` adds gradients and
    `apply` uses the sum; any number of micro-batches runs the same two programs.
    """

    def __init__(
        self,
        config: Config,
        model: QwenConfig,
        mesh: Mesh,
        optim: OptimConfig,
        head: str,
        total_updates: int,
        *,
        alone: bool = False,
    ):
        """Builds the functions; nothing is compiled before it is called.

        Args:
          config:        the run.
          model:         shape of this network.
          mesh:          where it lives.
          optim:         its optimizer.
          head:          "lm_head" or "score".
          total_updates: length of the learning-rate schedule.
          alone:         only the head is trained; the hidden states are another network's.

        With `model.lora` adapters and the critic's head are trained, on frozen weights.

        Raises:
          InputError: if the mesh does not divide a parameter, or the heads, or the attention asked for does not run here.
        """
        if model.num_key_value_heads % mesh.shape["tensor"]:
            raise InputError(
                f"config.mesh.tensor={mesh.shape['tensor']}: must divide the model's {model.num_key_value_heads} key-value heads"
            )
        self.model, self.mesh = model, mesh
        self.dtype = compute_dtype(config.model.compute_dtype)
        self.attention = probe.choose(config.model.attention, model, self.dtype, jax.jit)
        self.method, self.remat = self.attention.method, config.model.remat
        self.alone = alone
        adapters = config.model.lora
        self.scale = adapters.alpha / adapters.rank if adapters.rank else 1.0
        self.plain = jax.eval_shape(lambda: qwen.init(jax.random.key(0), model, head=head))
        self.shapes = trained_shapes(adapters, self.plain, alone=alone)
        self.plain_shardings = sharding.parameter_specs(self.plain, mesh)
        self.shardings = sharding.parameter_specs(self.shapes, mesh)
        self.rate = optimizer.schedule(optim.lr, warmup=optim.warmup, kind=optim.schedule, total=total_updates)
        self.transform = optimizer.optimizer(
            self.rate, clip_norm=optim.clip_norm, b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
        )
        self.state_shardings = self._state_shardings()
        self.start = jit(
            self.mesh, partial(optimizer.start, transform=self.transform), out_shardings=self.state_shardings, donate_argnums=0
        )
        self.zeros = jit(
            self.mesh,
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            out_shardings=self.shardings,
        )
        self.apply = jit(
            self.mesh,
            lambda state, grads: optimizer.apply(state, grads, self.transform, self.rate),
            out_shardings=(self.state_shardings, sharding.replicated(mesh)),
            donate_argnums=0,
        )

    def fresh(self, key: jax.Array, dtype: Any) -> Params:
        """What trains where it does not come from a file: adapters and a head that change nothing."""
        made: Params = jit(self.mesh, partial(lora.init, shapes=self.typed_shapes(dtype)), out_shardings=self.shardings)(key)
        return made

    def whole(self, params: Params, base: Params) -> Params:
        """All weights that act, of what trains and what it stands on."""
        return lora.attach(base, params, self.scale)

    def forward(self, params: Params, batch: Any) -> jax.Array:
        """Final hidden states of packed rows, [N, L, D]; `params` from `whole`."""
        hidden, _ = qwen.hidden_states(
            params,
            self.model,
            jnp.asarray(batch.tokens),
            jnp.asarray(batch.positions),
            jnp.asarray(batch.segment_ids),
            dtype=self.dtype,
            method=self.method,
            remat=self.remat,
        )
        return hidden

    def typed_shapes(self, dtype: Any) -> Params:
        """Shapes of what trains, in this dtype."""
        return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(dtype)), self.shapes)

    def state_shapes(self, dtype: Any) -> TrainState:
        """Shapes of a train state whose parameters have this dtype."""
        return jax.eval_shape(partial(optimizer.start, transform=self.transform), self.typed_shapes(dtype))

    def accumulator(self, objective: Any) -> Any:
        """Jits (params, grads, base, batch, *rest) -> (grads + gradient, metrics of this micro-batch); grads are donated.

        The base is what the parameters stand on and gets no gradient: frozen weights, or another network; empty where everything
        trains.
        """

        def accumulate(params, grads, base, batch, *rest):
            def loss(params):
                return objective(self.whole(params, base), self.forward, batch, *rest)

            gradient, metrics = jax.grad(loss, has_aux=True)(params)
            return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, gradient), metrics

        return jit(self.mesh, accumulate, out_shardings=(self.shardings, sharding.replicated(self.mesh)), donate_argnums=1)

    def _state_shardings(self) -> TrainState:
        everywhere: Any = sharding.replicated(self.mesh)
        moments = optax.tree_utils.tree_map_params(
            self.transform,
            lambda _, s: s,
            jax.eval_shape(self.transform.init, self.shapes),
            self.shardings,
            transform_non_params=lambda _: everywhere,
        )
        return TrainState(self.shardings, moments, everywhere, everywhere)


class Steps:
    """The jitted functions of a run.

    actor, critic:  the two networks in training; no critic where the advantages need none. Everything below but the updates
                    takes all weights that act, from `Network.whole`.
    decode_weights: actor params -> weights of the token loop.
    rollout:        what `jax_ppo.rollout.engine` runs.
    score_policy:   (params, batch, logprobs, entropy) -> the two [B, R] arrays with this micro-batch's tokens filled in.
    score_values:   (params, batch, values, after) -> the same for values [B, R], and [B] behind the last token.
    experience:     see `jax_ppo.ppo.update.make_experience`.
    update_actor, update_critic: accumulate a micro-batch.
    """

    def __init__(self, config: Config, actor: QwenConfig, critic: QwenConfig | None, mesh: Mesh):
        """Builds the functions for a configuration, the shapes of both networks, and a mesh."""
        self.mesh = mesh
        critic_updates, warmup = config.total_updates, min(config.ppo.critic_warmup, config.train.iterations)
        actor_updates = critic_updates - warmup * config.updates_per_iteration
        self.actor = Network(config, actor, mesh, config.actor_optim, "lm_head", actor_updates)
        alone = config.critic.trunk == "actor"
        self.critic: Network | None = None
        if critic:
            self.critic = Network(config, critic, mesh, config.critic_optim, "score", critic_updates, alone=alone)
        self._rollout(config, actor)
        self._scoring(config)
        self._updates(config)

    def _rollout(self, config: Config, model: QwenConfig) -> None:
        net, mesh = self.actor, self.mesh
        self.decode_weights = jit(
            mesh,
            partial(qwen.decode_weights, config=model, dtype=net.dtype),
            out_shardings=decode_shardings(net.plain, model, mesh),
        )
        split = NamedSharding(mesh, PartitionSpec(sharding.ROWS, "tensor"))
        stacked = NamedSharding(mesh, PartitionSpec(None, sharding.ROWS, "tensor"))
        size = min(config.rollout.segment, config.rollout.max_response_tokens)

        def empty(slots: int, width: int) -> qwen.Cache:
            heads, size = model.num_key_value_heads, model.head_dim
            keys, vals = jnp.zeros((slots, heads, size, width), net.dtype), jnp.zeros((slots, heads, width, size), net.dtype)
            return [(keys, vals)] * model.num_hidden_layers

        def prefill(params, tokens, lengths):
            return qwen.prefill(params, model, tokens, lengths, dtype=net.dtype, method=net.method)

        def segment(weights, cache, rows, column, enough, sampling):
            return decoding.segment(weights, model, cache, rows, column, enough, sampling, size=size, dtype=net.dtype)

        self.rollout = decoding.Programs(
            empty=jit(mesh, empty, static_argnums=(0, 1), out_shardings=split),
            prefill=jit(mesh, prefill, out_shardings=stacked),
            arrange=jit(mesh, decoding.arrange, static_argnames="width", out_shardings=split),
            admit=jit(mesh, decoding.admit, out_shardings=split, donate_argnums=0),
            segment=jit(mesh, segment, out_shardings=(split, sharding.replicated(mesh)), donate_argnums=1),
        )

    def _scoring(self, config: Config) -> None:
        everywhere = sharding.replicated(self.mesh)

        def score_policy(params, batch, logprobs, entropy):
            new, ent = update.policy_scores(self.actor.forward, params, batch, temperature=config.rollout.temperature)
            return update.scatter(logprobs, new, batch.source), update.scatter(entropy, ent, batch.source)

        def score_values(params, batch, values, after):
            assert self.critic
            new = qwen.values(params, self.critic.forward(params, batch))
            return update.scatter(values, new, batch.source), update.scatter(after, new, batch.last)

        ppo = config.ppo
        experience = partial(
            update.make_experience,
            estimator=ppo.estimator,
            samples=config.rollout.n,
            gamma=ppo.gamma,
            lam_actor=ppo.lam_actor,
            lam_critic=ppo.lam_critic,
            lam_length=ppo.lam_length,
            clip_advantage=ppo.clip_advantage,
            kl_kind=ppo.kl_kind,
            bootstrap_truncated=ppo.truncated == "bootstrap",
        )
        self.score_policy = jit(self.mesh, score_policy, out_shardings=everywhere, donate_argnums=(2, 3))
        self.score_values = jit(self.mesh, score_values, out_shardings=everywhere, donate_argnums=(2, 3))
        self.experience = jit(self.mesh, experience, out_shardings=everywhere)

    def _updates(self, config: Config) -> None:
        ppo = config.ppo
        actor_objective = partial(
            update.actor_objective,
            temperature=config.rollout.temperature,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            dual_clip=ppo.dual_clip or None,
            entropy_coef=ppo.entropy_coef,
            kl_loss_coef=ppo.kl_loss_coef,
            kl_kind=ppo.kl_kind,
        )
        self.update_actor = self.actor.accumulator(actor_objective)
        if self.critic:
            self.update_critic = self.critic.accumulator(partial(update.critic_objective, clip=ppo.clip_value or None))


def decode_shardings(shapes: Params, model: QwenConfig, mesh: Mesh) -> Params:
    """Where the weights of the token loop live: as the parameters, but whole over `fsdp`, and a list of layers."""
    specs = sharding.decode_specs(shapes, mesh)
    one_layer = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s.spec[1:])), specs["model"]["layers"])
    return {**specs, "model": {**specs["model"], "layers": [one_layer] * model.num_hidden_layers}}
