"""Reads YAML files, environment variables and the command line into one frozen spec, and keeps each value's source."""
