"""Checkpoints: one atomic orbax step with both train states and everything else that a run needs to continue."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_ppo.types import InputError, Params, RunError, TrainState

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of a run, in WORKDIR/checkpoints.

    The newest are kept for continuing and, beside them, those with the best held-out accuracy, whichever process saved them. A
    checkpoint without a finite score is never among the best. Only the one process that trains may open this; readers call
    `restore_params`.
    """

    def __init__(self, workdir: Path, *, keep_last: int, keep_best: int):
        """Opens the directory, which is made if it is missing, and removes what an earlier process left half written."""
        _quiet()
        self._keep_last, self._keep_best = keep_last, keep_best
        self._manager = ocp.CheckpointManager(
            (workdir / FOLDER).absolute(),
            options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
            item_names=("actor", "critic", "rest"),
        )
        self._scores = {step: self._read_score(step) for step in self.steps()}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints stay; orbax asks at every save."""
        steps = [c.step for c in checkpoints]
        scored = sorted((self._scores[step], step) for step in steps if self._scores[step] is not None)
        best = [step for _, step in scored[len(scored) - min(self._keep_best, len(scored)) :]]
        return [step in best or step in steps[-self._keep_last :] for step in steps]

    def save(self, iteration: int, actor: TrainState, critic: TrainState, rest: dict[str, Any], score: float | None) -> None:
        """Starts to save; returns once the arrays are copied to the host.

        Args:
          iteration: iterations done; names the checkpoint.
          actor, critic: the train states.
          rest:      plain JSON values.
          score:     held-out accuracy, or None.

        Raises:
          RunError: if this save or the one before it failed, or if a checkpoint as new as this one exists.
        """
        self.wait()
        if iteration <= max(self.steps(), default=-1):
            raise RunError(f"checkpoint {iteration}: {self._manager.directory} already holds {self.steps()}")
        self._scores[iteration] = score = score if score is not None and math.isfinite(score) else None
        args = ocp.args.Composite(
            actor=ocp.args.StandardSave(actor),
            critic=ocp.args.StandardSave(critic),
            rest=ocp.args.JsonSave({"rest": rest, "score": score}),
        )
        try:
            if not self._manager.save(iteration, args=args, force=True):
                raise RunError(f"checkpoint {iteration}: orbax did not save it")
        except (OSError, ValueError) as error:
            raise RunError(f"saving checkpoint {iteration} failed: {_line(error)}") from error

    def check(self) -> None:
        """Raises what a save that is over has died of; does not wait for one that goes on.

        Raises:
          RunError: if a save failed.
        """
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          RunError: if a save failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the writing thread died of
            raise RunError(f"saving checkpoint {max(self._scores)} failed: {_line(error)}") from error

    def steps(self) -> list[int]:
        """The checkpoints, oldest first; one that is being saved counts."""
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
        skipped: list[str] = []
        for step in reversed(self.steps()):
            args = ocp.args.Composite(
                actor=ocp.args.StandardRestore(actor), critic=ocp.args.StandardRestore(critic), rest=ocp.args.JsonRestore()
            )
            try:
                found = self._manager.restore(step, args=args)
                return step, found.actor, found.critic, found.rest["rest"], skipped
            except Exception as error:  # a broken file can fail in any layer below
                skipped.append(f"checkpoint {step} is broken: {_line(error)}")
        raise RunError(f"{self._manager.directory}: no checkpoint can be read: {'; '.join(skipped)}")

    def discard_after(self, iteration: int) -> None:
        """Deletes broken checkpoints behind the one a run continues from, so that they can be saved again."""
        for step in [s for s in self.steps() if s > iteration]:
            self._manager.delete(step)

    def close(self) -> None:
        """Waits and closes.

        Raises:
          RunError: if a save failed.
        """
        self.wait()
        self._manager.close()

    def _read_score(self, step: int) -> float | None:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(rest=ocp.args.JsonRestore())).rest["score"]
        except Exception:  # a broken checkpoint has no score; `restore` will say what is wrong with it
            return None


def restore_params(workdir: Path, params: Params) -> tuple[int, Params, list[str]]:
    """The actor's parameters of the newest checkpoint that is whole; nothing else is read, and nothing is changed on disk.

    Args:
      workdir: of a run, which may be going on.
      params:  tree of `jax.ShapeDtypeStruct` with shardings.

    Returns:
      (iteration, params, skipped): `skipped` says which newer checkpoints are broken, and why.

    Raises:
      InputError: if there is no checkpoint that can be read.
    """
    _quiet()
    folder = (workdir / FOLDER).absolute()
    skipped: list[str] = []
    item = {"params": params}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
    for step in sorted(steps, reverse=True):
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        try:
            return step, ocp.PyTreeCheckpointer().restore(folder / str(step) / "actor", args=args)["params"], skipped
        except Exception as error:  # a broken file can fail in any layer below
            skipped.append(f"checkpoint {step} is broken: {_line(error)}")
    raise InputError(f"{folder}: no checkpoint can be read: {'; '.join(skipped)}" if skipped else f"{folder}: no checkpoint yet")


def abstract(state: Any, shardings: Any) -> Any:
    """Shapes and shardings of a train state, to restore onto."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _quiet() -> None:
    # orbax reports every file at level INFO, and what it raises once more with its whole stack at level ERROR.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _line(error: Exception) -> str:
    """The first line of an error, without the specification that tensorstore appends; a long one keeps its ends: what and why."""
    lines = str(error.args[0] if error.args else error).splitlines() or [type(error).__name__]
    text = re.sub(r"( \[tensorstore_spec=|\. See full TensorStore).*", "", lines[0])
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}"
