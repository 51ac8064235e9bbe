"""Everything that knows Slurm's formats: its variables, host lists, options, commands and states."""
