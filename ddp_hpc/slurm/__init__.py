"""Slurm's language and nothing else: its variables, host lists, options, commands, states."""
