"""Runs something on purpose and compares: `certify`, `replay`, `bisect`, `audit` and `drill`. Public: these commands.

Only `cli` imports it, and only when such a command is asked for: without this folder, everything else works.
"""
