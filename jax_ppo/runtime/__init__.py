"""What surrounds the mathematics: the files of a run, the terminal, the command line, the hub."""
