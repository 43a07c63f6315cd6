"""What surrounds the mathematics: the files of a run, the terminal, checkpoints, several hosts."""
