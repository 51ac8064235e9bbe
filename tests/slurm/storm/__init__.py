"""A storm: several runs at once on the test cluster under random faults; afterwards each must have lost nothing.

make campaign-storm ARGS="--seed 1 --minutes 8 --runs 3"
"""
