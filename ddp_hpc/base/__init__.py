"""What every wing may use: files, signals, locks, patience with file systems, types of fields, exit codes.

Public: `errors`.
"""
