"""Checkpoints: one atomic orbax step with both train states and everything else that a run needs to continue."""

import logging
import math
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from jax_ppo.types import InputError, RunError, TrainState

SCORE = "score"


class Checkpoints:
    """The checkpoints of a run, in WORKDIR/checkpoints.

    The newest are kept for continuing and, separately, those with the best held-out accuracy; a checkpoint without a finite
    score counts as the worst.
    """

    def __init__(self, workdir: Path, *, keep_last: int, keep_best: int):
        """Opens the directory, which is made if it is missing."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file at level INFO and WARNING
        policies: list[Any] = [
            managers.LatestN(keep_last),
            managers.BestN(get_metric_fn=_score, n=keep_best, keep_checkpoints_without_metrics=False),
        ]
        self._manager = ocp.CheckpointManager(
            (workdir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies), cleanup_tmp_directories=True
            ),
            item_names=("actor", "critic", "rest"),
        )

    def save(self, iteration: int, actor: TrainState, critic: TrainState, rest: dict[str, Any], score: float | None) -> None:
        """Starts to save; returns once the arrays are copied to the host.

        Args:
          iteration: iterations done; names the checkpoint.
          actor, critic: the train states.
          rest:      plain JSON values.
          score:     held-out accuracy, or None.

        Raises:
          RunError: if this, or the save before it, failed.
        """
        args = ocp.args.Composite(
            actor=ocp.args.StandardSave(actor), critic=ocp.args.StandardSave(critic), rest=ocp.args.JsonSave(rest)
        )
        metrics = {SCORE: score if score is not None and math.isfinite(score) else None}
        try:
            if not self._manager.save(iteration, args=args, metrics=metrics, force=True):
                raise RunError(f"checkpoint {iteration}: not saved; {self._manager.directory} holds {self._manager.all_steps()}")
        except (OSError, ValueError) as error:
            raise RunError(f"checkpoint {iteration}: {error}") from error

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          RunError: if a save failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the writing thread died of
            raise RunError(f"saving a checkpoint failed: {str(error).splitlines()[0]}") from error

    def steps(self) -> list[int]:
        """The checkpoints on disk, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(self, actor: TrainState, critic: TrainState) -> tuple[int, TrainState, TrainState, dict[str, Any], list[str]]:
        """Reads the newest checkpoint that is whole.

        Args:
          actor, critic: trees of `jax.ShapeDtypeStruct` with the shardings to restore onto.

        Returns:
          (iteration, actor, critic, rest, skipped): `skipped` says which newer checkpoints are broken, and why.

        Raises:
          RunError: if every checkpoint is broken.
        """
        skipped = []
        for step in reversed(self.steps()):
            args = ocp.args.Composite(
                actor=ocp.args.StandardRestore(actor), critic=ocp.args.StandardRestore(critic), rest=ocp.args.JsonRestore()
            )
            try:
                found = self._manager.restore(step, args=args)
                return step, found.actor, found.critic, found.rest, skipped
            except Exception as error:  # a broken file can fail in any layer below
                skipped.append(f"checkpoint {step} is broken ({str(error).splitlines()[0][:200]})")
        raise RunError(f"{self._manager.directory}: no checkpoint can be read: {'; '.join(skipped)}")

    def restore_params(self, params: Any) -> tuple[int, Any]:
        """The actor's parameters of the newest checkpoint, without the optimizer, which may not fit.

        Args:
          params: tree of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          InputError: if there is no checkpoint.
        """
        if not self.steps():
            raise InputError(f"{self._manager.directory}: no checkpoint yet")
        step = self.steps()[-1]
        item = {"params": params}
        args = ocp.args.PyTreeRestore(item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True)
        path = Path(str(self._manager.directory)) / str(step) / "actor"
        return step, ocp.PyTreeCheckpointer().restore(path, args=args)["params"]

    def discard_after(self, iteration: int) -> None:
        """Deletes broken checkpoints behind the one a run continues from, so that they can be saved again."""
        for step in [s for s in self.steps() if s > iteration]:
            self._manager.delete(step)

    def close(self) -> None:
        """Waits and closes."""
        self.wait()
        self._manager.close()


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and shardings of a train state, to restore onto."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _score(metrics: Any) -> float:
    score = (metrics or {}).get(SCORE)
    return -math.inf if score is None or not math.isfinite(score) else float(score)
