"""Reads run directories, on any host, and changes nothing in them: status, logs, reports, why a run failed, what a site offers.

Nothing here is public; `ddp-hpc VERB --json` is what programs read.
"""
