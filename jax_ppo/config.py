"""The configuration: every key, its default, its meaning, what is allowed, and the sizes that follow from it.

`configs/*.py` start from `default_config()` and say only what differs; `resolve` turns the result into frozen dataclasses and
refuses what cannot work, with one line that names the key, its value and what is allowed. A key is declared in one place, by
`key(default, meaning, rule)`; the command line prints its help from there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_collections

from jax_ppo import schema
from jax_ppo.schema import (
    ABOVE_ZERO,
    DECAY,
    DEVICES,
    DUAL,
    FILLED,
    FRACTION,
    INSIDE,
    POSITIVE,
    UNSIGNED,
    Key,
    Rule,
    at_least,
    key,
    one_of,
)
from jax_ppo.types import InputError

RESUME = Rule(lambda v: v in ("auto", "never") or "/" in v, "auto, never, or a path with a /, of a workdir or its checkpoints/N")
UNTRUNCATED = "(a truncated distribution would be sampled but another one trained)"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights, for actor and critic (arXiv 2106.09685). The critic's head is trained whole."""

    rank: int = key(0, "r: columns of A and rows of B in W + alpha / r x A B; 0 trains the weights themselves", UNSIGNED)
    alpha: float = key(32.0, "scale of the adapters, divided by the rank", ABOVE_ZERO)
    targets: str = key(
        ",".join(PROJECTIONS),
        "the projections that are adapted, separated by commas",
        Rule(lambda v: {*v.split(",")} <= {*PROJECTIONS}, f"some of {', '.join(PROJECTIONS)}, with commas between"),
    )


@dataclass(frozen=True)
class ModelConfig:
    """The actor."""

    path: str = key(
        "Qwen/Qwen2.5-0.5B-Instruct", 'hub id, local Hugging Face directory, or "builtin" for the small model', FILLED
    )
    param_dtype: str = key("float32", "of the master weights and the optimizer moments", one_of("float32", "bfloat16"))
    compute_dtype: str = key(
        "auto",
        "of matmuls and cache; auto is bfloat16 on accelerators, float32 on a CPU",
        one_of("auto", "float32", "bfloat16"),
    )
    attention: str = key(
        "auto",
        "full scores a row against itself at once, blockwise in blocks of queries; splash (TPU) and cudnn (GPU) are kernels;"
        " auto takes the kernel where it runs, else full or blockwise by size",
        one_of("auto", "full", "blockwise", "cudnn", "splash"),
    )
    remat: bool = key(True, "compute the activations of a layer again in the backward pass instead of keeping them")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class CriticConfig:
    """The critic. Its scalar head starts at zero."""

    path: str = key("", "directory or hub id of a backbone of its own; empty takes the actor's")
    trunk: str = key(
        "own", "own trains a whole network; actor trains a head alone, on the actor's hidden states", one_of("own", "actor")
    )


@dataclass(frozen=True)
class DataConfig:
    """The problems."""

    path: str = key("openai/gsm8k", 'hub id, directory with train.jsonl and test.jsonl, one JSONL file, or "builtin"', FILLED)
    eval_path: str = key("", "held-out problems, as path; empty takes the test split of path")
    eval_limit: int = key(0, "keep the first problems of the held-out set only; 0 keeps all", UNSIGNED)
    train_limit: int = key(0, "the same for the training set", UNSIGNED)
    instruction: str = key("", "text appended to every question")
    max_prompt_tokens: int = key(512, "longest prompt", POSITIVE)
    overlong: str = key("drop", "what happens to longer prompts; dropped ones are counted and printed", one_of("drop", "error"))


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling."""

    batch: int = key(256, "prompts an iteration", POSITIVE)
    n: int = key(1, "responses a prompt", POSITIVE)
    max_response_tokens: int = key(512, "R, the longest response", POSITIVE)
    temperature: float = key(1.0, "of the sampling distribution; evaluation is greedy", ABOVE_ZERO)
    top_k: int = key(0, "tokens that may be drawn; 0 is off", Rule(lambda v: v == 0, f"0 {UNTRUNCATED}"))
    top_p: float = key(1.0, "probability mass that may be drawn; 1 is off", Rule(lambda v: v == 1, f"1 {UNTRUNCATED}"))
    slots: int = key(0, "rows decoded at once, which bounds the cache; 0 means all", UNSIGNED)
    segment: int = key(64, "tokens between two looks of the host at the rows that are done", POSITIVE)


@dataclass(frozen=True)
class RewardConfig:
    """The score of a response."""

    method: str = key("strict", "rule for the answer", one_of("strict", "flexible", "verl"))
    format_score: float = key(0.0, "score of a wrong answer in the right form")
    missing_end_penalty: float = key(0.0, "subtracted where no end token was drawn", UNSIGNED)
    overlong_buffer: int = key(0, "last tokens before the limit, over which a penalty grows from 0 to 1; 0 is off", UNSIGNED)
    custom: str = key("", '"path/to/file.py:function", called as function(prompt, response, answer) -> float instead of the rule')


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm; the mathematics stands in `jax_ppo.ppo`."""

    estimator: str = key(
        "gae",
        "advantages from a critic, or without one: a response beside the others to its prompt, or its returns to go",
        one_of("gae", "rloo", "grpo", "reinforce"),
    )
    gamma: float = key(1.0, "discount a token", FRACTION)
    lam_actor: float = key(0.95, "lambda of the policy's advantages", FRACTION)
    lam_critic: float = key(1.0, "lambda of the critic's targets", FRACTION)
    lam_length: float = key(0.0, "alpha of lambda = 1 - 1 / (alpha x length) in place of lam_actor; 0 is off", UNSIGNED)
    clip_advantage: float = key(0.0, "largest magnitude of an advantage; 0 is off", UNSIGNED)
    clip_low: float = key(0.2, "the ratio is clipped from below at 1 - clip_low", INSIDE)
    clip_high: float = key(0.2, "the ratio is clipped from above at 1 + clip_high", ABOVE_ZERO)
    dual_clip: float = key(0.0, "bound of the ratio for negative advantages; 0 is off", DUAL)
    clip_value: float = key(0.0, "clip range of the value loss; 0 is off", UNSIGNED)
    kl_coef: float = key(0.001, "weight of the KL penalty inside the reward", UNSIGNED)
    kl_kind: str = key("k1", "estimate of the KL", one_of("k1", "k2", "k3", "abs"))
    kl_target: float = key(0.0, "KL to hold by adapting kl_coef; 0 keeps kl_coef fixed", UNSIGNED)
    kl_loss_coef: float = key(0.0, "weight of a KL term in the actor's loss", UNSIGNED)
    entropy_coef: float = key(0.0, "weight of the entropy in the actor's loss; positive keeps the policy exploring")
    old_logprobs: str = key(
        "recompute",
        "where the old policy's log-probabilities come from: a scoring pass, or the sampler, of which one micro-batch is checked",
        one_of("recompute", "rollout"),
    )
    epochs: int = key(1, "passes over a rollout", POSITIVE)
    minibatches: int = key(4, "updates a pass; divides rollout.batch x rollout.n", POSITIVE)
    micro_tokens: int = key(8192, "tokens of one forward and backward pass; changes memory and speed only", POSITIVE)
    aggregation: str = key(
        "token-mean",
        "how token losses are averaged",
        one_of("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    truncated: str = key(
        "terminal",
        "a response that ran into the limit ends with value 0, with the critic's value, or is left out of the policy loss",
        one_of("terminal", "bootstrap", "mask"),
    )
    target_kl: float = key(
        0.0, "end the actor's epochs of an iteration once actor/ppo_kl_k3 of a minibatch exceeds this; 0 is off", UNSIGNED
    )
    critic_warmup: int = key(0, "first iterations, which train the critic alone", UNSIGNED)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW of one network."""

    lr: float = key(1e-6, "learning rate", UNSIGNED)
    warmup: int = key(0, "updates over which the rate rises to lr", UNSIGNED)
    schedule: str = key(
        "constant", "after that; the falling ones reach 0 at the last update", one_of("constant", "linear", "cosine")
    )
    weight_decay: float = key(0.0, "decoupled decay of the matrices", UNSIGNED)
    clip_norm: float = key(1.0, "largest norm of a gradient; 0 is off", UNSIGNED)
    b1: float = key(0.9, "decay rate of the first moment", DECAY)
    b2: float = key(0.999, "decay rate of the second moment", DECAY)


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the device count, and one of them may be -1."""

    data: int = key(1, "split the rows of a batch", DEVICES)
    fsdp: int = key(-1, "split the rows of a batch, and weights and moments", DEVICES)
    tensor: int = key(1, "split heads, MLP columns and vocabulary", DEVICES)


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    iterations: int = key(100, "in all, those before a resume included", POSITIVE)
    seed: int = key(0, "of everything random", Rule(lambda v: 0 <= v < 2**31, "from 0 to 2147483647"))
    resume: str = key(
        "auto", "auto continues a workdir that has checkpoints, never refuses one; a path starts from another run's", RESUME
    )
    max_skipped: int = key(5, "non-finite gradients in a row that end the run", POSITIVE)
    heartbeat_seconds: int = key(100, "of several processes, one that is silent for so long is dead, and ends all", at_least(5))


@dataclass(frozen=True)
class WarmstartConfig:
    """Supervised start on worked solutions, before the first iteration."""

    steps: int = key(0, "updates; 0 is off", UNSIGNED)
    batch: int = key(64, "sequences an update", POSITIVE)
    lr: float = key(1e-3, "highest learning rate", ABOVE_ZERO)
    b2: float = key(0.95, "decay rate of the second moment", DECAY)


@dataclass(frozen=True)
class EvalConfig:
    """Held-out accuracy while training."""

    every: int = key(10, "iterations between evaluations, and one after the last; 0 is off", UNSIGNED)
    limit: int = key(0, "problems of one evaluation during training; 0 means all", UNSIGNED)
    at_start: bool = key(True, "evaluate before the first iteration")
    samples: int = key(0, "sampled responses a problem beside the greedy one", UNSIGNED)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints. The last iteration is always saved."""

    every: int = key(10, "iterations between checkpoints", POSITIVE)
    keep_last: int = key(1, "how many of the newest stay", POSITIVE)
    keep_best: int = key(1, "how many of the most accurate stay beside them", UNSIGNED)


@dataclass(frozen=True)
class LogConfig:
    """What is written beside metrics.jsonl."""

    tensorboard: bool = key(False, "write WORKDIR/tensorboard")
    wandb: str = key("", "project; empty is off")
    samples: int = key(16, "responses an iteration that go into WORKDIR/samples", UNSIGNED)
    profile: int = key(-1, "iteration whose device trace goes into WORKDIR/profile; -1 is off", at_least(-1))


@dataclass(frozen=True)
class Config:
    """A whole run. See the section classes for the meaning of each key."""

    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    actor_optim: OptimConfig = field(default_factory=OptimConfig)
    critic_optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need values."""
        return self.ppo.estimator == "gae"

    @property
    def sequences(self) -> int:
        """B: responses an iteration."""
        return self.rollout.batch * self.rollout.n

    @property
    def slots(self) -> int:
        """Rows decoded at once: `rollout.slots`, but never more than an iteration has responses."""
        return min(self.rollout.slots or self.sequences, self.sequences)

    @property
    def max_sequence_tokens(self) -> int:
        """S: the longest prompt and response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer updates of one network in one iteration."""
        return self.ppo.epochs * self.ppo.minibatches

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the critic in the whole run; the length of its learning-rate schedule."""
        return self.train.iterations * self.updates_per_iteration


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values, as `WORKDIR/config.json` stores it."""
    return dataclasses.asdict(config)


def default_config() -> ml_collections.ConfigDict:
    """Every key with its default, as the ConfigDict that `configs/*.py` change and the command line overrides."""
    return ml_collections.ConfigDict(to_dict(Config()))


@functools.cache
def keys() -> dict[str, Key]:
    """Every key, as "section.key"."""
    return schema.keys(Config())


def resolve(raw: Mapping[str, Any]) -> Config:
    """Checks a configuration and returns it as frozen dataclasses.

    Args:
      raw: sections and keys of `default_config()`, with any values of the same types; what is missing keeps its default.

    Returns:
      The configuration, whose every value is allowed and whose values fit together.

    Raises:
      InputError: naming the key, its value, and what is allowed.
    """
    config: Config = schema.build(Config(), schema.complete(Config(), raw))
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """The relations between keys, each refused with its numbers."""
    ppo, rollout, iterations = config.ppo, config.rollout, config.train.iterations

    def need(fits: bool, name: str, words: str) -> None:
        if not fits:
            raise InputError(f"config.{name}={schema.read(config, name)}: must {words}")

    product = f"rollout.batch x rollout.n = {rollout.batch} x {rollout.n} = {config.sequences}"
    need(config.sequences % ppo.minibatches == 0, "ppo.minibatches", f"divide {product}")
    longest = f"{config.data.max_prompt_tokens} + {rollout.max_response_tokens} = {config.max_sequence_tokens}"
    room = f"hold one sequence, data.max_prompt_tokens + rollout.max_response_tokens = {longest}"
    need(ppo.micro_tokens >= config.max_sequence_tokens, "ppo.micro_tokens", room)
    limit = f"be at most rollout.max_response_tokens = {rollout.max_response_tokens}"
    need(config.reward.overlong_buffer <= rollout.max_response_tokens, "reward.overlong_buffer", limit)
    beside = ppo.estimator not in ("rloo", "grpo") or rollout.n > 1
    need(beside, "ppo.estimator", "be gae or reinforce where rollout.n is 1: there is no other response to compare with")
    if not config.has_critic:
        words = f"where ppo.estimator is {ppo.estimator!r}, which has no critic"
        need(ppo.truncated != "bootstrap", "ppo.truncated", f"be terminal or mask {words}")
        for name in ("critic.path", "critic.trunk", "ppo.critic_warmup", "ppo.clip_value", "ppo.lam_length"):
            default = keys()[name].default
            need(schema.read(config, name) == default, name, f"be {default!r} {words}")
    need(config.critic.trunk == "own" or not config.critic.path, "critic.path", "be empty where critic.trunk is 'actor'")
    need(ppo.kl_coef > 0 or ppo.kl_target == 0, "ppo.kl_target", "be 0 where ppo.kl_coef is 0, which it would scale")
    for network, trained in (("actor", iterations - ppo.critic_warmup), ("critic", iterations)):
        optim, updates = getattr(config, f"{network}_optim"), trained * config.updates_per_iteration
        formula = f"iterations x epochs x minibatches = {trained} x {ppo.epochs} x {ppo.minibatches} = {updates}"
        fits = optim.schedule == "constant" or optim.warmup == 0 or optim.warmup < updates
        need(fits, f"{network}_optim.warmup", f"be below the updates of the {network}, {formula}")
