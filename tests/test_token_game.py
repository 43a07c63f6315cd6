"""PPO as a whole on a game with a known answer, and proof that the checks see the mistakes that other trainers made."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from token_game import CHOICES, EVEN, RESPONSE, TARGETS, Game, compile_once

from jax_ppo.config import OptimConfig
from jax_ppo.ppo import advantages, packing, update

FRESH = 10**6  # an iteration that no training used


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("programs")):
        yield


def check_values(seed: int, *, gamma: float, lam: float) -> float:
    """The critic of a policy that stays uniform learns its value function. Returns the largest error over visited prefixes."""
    iterations = 60
    critic = OptimConfig(lr=5e-3, schedule="linear")
    game = Game(seed, iterations, actor=0.0, critic=critic, gamma=gamma, lam_actor=lam, lam_critic=lam, critic_warmup=iterations)
    game.run()
    rollout = game.play(FRESH)
    error = float(np.abs(game.values(rollout) - game.true_values(rollout)).max())
    assert error < 0.05, f"value error {error:.3f}"
    return error


class Optimum(NamedTuple):
    greedy: float
    sampled: float
    clip_fraction: float
    first_ratio: float


def check_optimum(seed: int) -> Optimum:
    """The policy finds the targets, using each rollout for two epochs of four minibatches."""
    game = Game(seed, 14, actor=2e-3, critic=OptimConfig(lr=5e-3), shares=EVEN)
    metrics = game.run()
    result = Optimum(
        greedy=float(game.scores(game.play(FRESH, temperature=0.0)).mean()),
        sampled=float(game.scores(game.play(FRESH)).mean()),
        clip_fraction=max(m["actor/pg_clipfrac"] for m in metrics),
        first_ratio=max(m["training/first_ratio_dev_max"] for m in metrics),
    )
    assert result.greedy > 0.95, f"greedy score {result.greedy:.3f}"
    assert result.sampled > 0.9, f"sampled score {result.sampled:.3f}"
    assert result.clip_fraction > 0.02, f"clip fraction {result.clip_fraction:.3f}"
    assert result.first_ratio < 1e-5, f"first ratio {result.first_ratio}"
    return result


def check_clip(seed: int) -> tuple[float, float]:
    """However often one rollout is used, no probability doubles or halves. Returns the smallest and the largest ratio.

    A token's own gradient ends at 1 +- 0.1. Its probability still moves with those of the three other choices, which sum to one
    with it: to 1 +- 3 x 0.1 where all three stand at the other end of their range. The update that carries a ratio out of its
    range, and weights shared with other prefixes, add to that. Without the clip, ratios go on towards CHOICES = 4 and 0.
    """
    critic = OptimConfig(lr=5e-3)
    [metrics] = Game(seed, 1, actor=1e-3, critic=critic, epochs=64, minibatches=1, clip_low=0.1, clip_high=0.1).run()
    low, high = metrics["actor/ratio/min"], metrics["actor/ratio/max"]
    assert metrics["actor/pg_clipfrac"] > 0.1, f"clip fraction {metrics['actor/pg_clipfrac']:.3f}"
    assert low > 0.5 and high < 2.0, f"ratios from {low:.2f} to {high:.2f}"
    return low, high


def check_lambda(seed: int, lam: float) -> np.ndarray:
    """With a critic that says 0, lambda alone carries the score back: 0 to no token but the last, 1 to all of them.

    Returns how often the policy meets the target at each position; it began with 0.25 everywhere.
    """
    shares = np.array([0.25, 0.25, 0.5])
    game = Game(seed, 24, actor=1e-3, critic=OptimConfig(lr=0.0), shares=shares, lam_actor=lam)
    game.run()
    met = game.hits(game.play(FRESH)).mean(axis=0)
    assert met[-1] > 0.85, f"the last token meets its target in {met[-1]:.2f} of all responses"
    earlier = met[:-1] > 0.85 if lam else met[:-1] < 0.5
    assert earlier.all(), f"lambda {lam}: the tokens before the last meet their targets in {met[:-1]} of all responses"
    return met


def test_true_values_against_all_responses():
    game = Game(0, 1, actor=0.0, critic=OptimConfig(), gamma=0.9)
    rollout = game.play(0)
    assert set(np.unique(rollout.tokens)) == set(range(CHOICES))
    np.testing.assert_allclose(rollout.logprobs, -np.log(CHOICES), atol=1e-6)
    continuations = [np.array(list(itertools.product(range(CHOICES), repeat=n))) for n in range(RESPONSE + 1)]
    for b, t in itertools.product(range(16), range(RESPONSE)):
        rest = continuations[RESPONSE - t]
        whole = np.concatenate([np.tile(rollout.tokens[b, :t], (len(rest), 1)), rest], axis=1)
        mean = ((whole == TARGETS[game.kinds[b]]) * [0.6, 0.3, 0.1]).sum(axis=1).mean()
        assert game.true_values(rollout)[b, t] == pytest.approx(0.9 ** (2 - t) * mean)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_critic_learns_the_value_function(gamma, lam):
    check_values(0, gamma=gamma, lam=lam)


def test_policy_finds_the_optimum():
    check_optimum(0)


def test_ratios_stay_bounded():
    check_clip(0)


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_lambda_decides_which_tokens_learn(lam):
    check_lambda(0, lam)


@pytest.mark.parametrize("by", [1, -1])
def test_shifted_values_are_caught(monkeypatch, by):
    original = packing.layout

    def shifted(*args, **kwargs):
        return [batch.replace(source=np.roll(batch.source, by, axis=1)) for batch in original(*args, **kwargs)]

    monkeypatch.setattr(packing, "layout", shifted)
    with pytest.raises(AssertionError, match="value error"):
        check_values(0, gamma=1.0, lam=0.95)


@pytest.mark.parametrize("token", [0, -2])
def test_reward_on_the_wrong_token_is_caught(monkeypatch, token):
    def misplaced(scores, kl, mask, *, kl_coef):
        return jnp.zeros_like(kl).at[:, token].set(scores)

    monkeypatch.setattr(advantages, "token_rewards", misplaced)
    with pytest.raises(AssertionError, match="value error"):
        check_values(0, gamma=0.9, lam=0.8)


@pytest.mark.parametrize(("asked", "always"), [(0.0, 1.0), (1.0, 0.0)])
def test_ignored_lambda_is_caught(monkeypatch, asked, always):
    original = advantages.gae

    def ignoring(*args, lam, **kwargs):
        return original(*args, lam=always, **kwargs)

    monkeypatch.setattr(advantages, "gae", ignoring)
    with pytest.raises(AssertionError, match="before the last"):
        check_lambda(0, asked)


def test_missing_clip_is_caught(monkeypatch):
    original = update.policy_loss

    def unclipped(*args, clip_low, clip_high, **kwargs):
        # The metrics are those of the real loss, so that the clip fraction gives nothing away.
        _, metrics = original(*args, clip_low=clip_low, clip_high=clip_high, **kwargs)
        return original(*args, clip_low=1.0, clip_high=jnp.inf, **kwargs)[0], metrics

    monkeypatch.setattr(update, "policy_loss", unclipped)
    with pytest.raises(AssertionError, match="ratios"):
        check_clip(0)
