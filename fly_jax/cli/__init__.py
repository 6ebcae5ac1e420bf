"""The command line: everything that prints, asks or draws progress, and nothing else."""
